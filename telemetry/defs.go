package telemetry

// The table of every metric. Labels with a closed set of values say so.
var (
	Requests = &Def{"penstock_requests_total", Counter, []string{"path", "code"},
		"Requests ended, by API path and by what the client was told (status code; 499 = the client left first; 502 also for a stream that broke after its 200)."}
	Outcomes = &Def{"penstock_request_outcomes_total", Counter, []string{"outcome"},
		"Requests by outcome: finished, failed, cancelled, shed, refused, local (answered without a replica). Admitted = finished + failed + cancelled."}
	Attempts     = &Def{"penstock_attempts_total", Counter, []string{"replica"}, "Attempts sent to a replica."}
	DeadlineLeft = &Def{"penstock_attempt_deadline_seconds", Histogram, []string{"attempt"},
		"Time left until the request's deadline when an attempt is sent: first, next."}
	Failovers = &Def{"penstock_failovers_total", Counter, []string{"reason"},
		"Attempts abandoned before the answer began and followed by another, by evidence (closed set, see fleet.Evidence)."}
	Sheds         = &Def{"penstock_shed_total", Counter, []string{"reason"}, "Requests shed, by reason: capacity, queue_full, deadline, no_replica, not_permitted, too_long, exhausted (every replica that could was tried)."}
	Cancellations = &Def{"penstock_cancellations_total", Counter, []string{"phase"},
		"Clients that left, by phase: held, headers, first_token, streaming."}
	InFlight       = &Def{"penstock_requests_in_flight", Gauge, nil, "Requests now inside the router, held ones included."}
	HeldRequests   = &Def{"penstock_held_requests", Gauge, []string{"pool"}, "Requests held at the router now."}
	HeldTokens     = &Def{"penstock_held_tokens", Gauge, []string{"pool"}, "Token-work (prompt + expected output) held at the router now."}
	ReplicaFlight  = &Def{"penstock_replica_requests_in_flight", Gauge, []string{"replica"}, "This router's requests at the replica now."}
	ReplicaPrefill = &Def{"penstock_replica_prefill_tokens", Gauge, []string{"replica"}, "Uncached prompt tokens sent to the replica whose first token has not come."}
	ReplicaKV      = &Def{"penstock_replica_kv_tokens", Gauge, []string{"replica"}, "KV tokens that this router's requests hold at the replica."}
	ReplicaState   = &Def{"penstock_replica_state", Gauge, []string{"replica", "state"}, "1 for the state the replica is in (closed set, see fleet.State), else 0."}
	ReplicaShare   = &Def{"penstock_replica_share_ratio", Gauge, []string{"replica"}, "Share of its capacity that a replica may use now (ramp), 0 to 1."}
	ReplicaWaiting = &Def{"penstock_replica_waiting_requests", Gauge, []string{"replica"}, "Requests waiting at the replica, as scraped."}
	ReplicaRunning = &Def{"penstock_replica_running_requests", Gauge, []string{"replica"}, "Requests running at the replica, as scraped."}
	ReplicaKVUsage = &Def{"penstock_replica_kv_usage_ratio", Gauge, []string{"replica"}, "KV-cache use of the replica, as scraped, 0 to 1."}
	ReplicaPreempt = &Def{"penstock_replica_preemptions", Gauge, []string{"replica"}, "Requests that the replica has preempted for want of KV cache since it started, as scraped."}
	PoolHeadroom   = &Def{"penstock_pool_headroom_ratio", Gauge, []string{"pool"}, "Share of the pool's token-work capacity (of replicas that take traffic) that is free now, 0 to 1."}
	Ejections      = &Def{"penstock_replica_ejections_total", Counter, []string{"pool", "reason"}, "Ejections of replicas by the evidence that led to them (closed set, see fleet.Evidence)."}
	TokensIn       = &Def{"penstock_prompt_tokens_total", Counter, []string{"replica"}, "Prompt tokens of answers, from usage, else estimated; of an answer that was cut after it began, too."}
	TokensCached   = &Def{"penstock_prompt_cached_tokens_total", Counter, []string{"replica"}, "Prompt tokens that the replica took from its prefix cache, from usage."}
	TokensOut      = &Def{"penstock_output_tokens_total", Counter, []string{"replica"}, "Output tokens of answers, from usage, else counted events; of an answer that was cut, those that came."}
	TokensWasted   = &Def{"penstock_wasted_tokens_total", Counter, []string{"reason"}, "Tokens generated for an attempt that was thrown away, by reason."}
	UsageEstimated = &Def{"penstock_usage_estimated_total", Counter, nil, "Answers without usage (or cut before it), whose tokens were estimated."}
	Integrity      = &Def{"penstock_stream_integrity_total", Counter, []string{"kind"}, "Streams that broke their protocol, by kind (closed set, see wire.Violation)."}
	TTFT           = &Def{"penstock_ttft_seconds", Histogram, []string{"replica"}, "From the request's arrival to its first content event."}
	ITL            = &Def{"penstock_itl_seconds", Histogram, []string{"replica"}, "Mean gap between content events of one answer."}
	E2E            = &Def{"penstock_request_seconds", Histogram, []string{"replica"}, "From the request's arrival to the end of its answer."}
	HoldTime       = &Def{"penstock_held_seconds", Histogram, []string{"pool"}, "Time that a request was held at the router before it was placed."}
	PredictRatio   = &Def{"penstock_ttft_observed_over_predicted_ratio", Gauge, []string{"replica"}, "Running mean of observed over predicted TTFT; far from 1 means that the model of this replica is wrong."}
	ScalePrefill   = &Def{"penstock_replica_prefill_scale_ratio", Gauge, []string{"replica"}, "Learned factor over the profile's prefill coefficients."}
	ScaleDecode    = &Def{"penstock_replica_decode_scale_ratio", Gauge, []string{"replica"}, "Learned factor over the profile's decode coefficients."}
	GoodRequests   = &Def{"penstock_slo_requests_total", Counter, []string{"met"}, "Ended generating requests by whether they met their objective: true, false."}
	ScrapeAge      = &Def{"penstock_scrape_age_seconds", Gauge, []string{"replica"}, "Age of the newest usable sample of the replica's metrics."}
	Scrapes        = &Def{"penstock_scrapes_total", Counter, []string{"replica", "result"}, "Scrapes by result: ok, timeout, refused, status, parse."}
	ScrapeSeconds  = &Def{"penstock_scrape_seconds", Histogram, []string{"replica"}, "Time that one scrape took."}
	Probes         = &Def{"penstock_probes_total", Counter, []string{"replica", "result"}, "Health probes by result: ok, failed, refused, timeout."}
	PeerDatagrams  = &Def{"penstock_peer_datagrams_total", Counter, []string{"result"},
		"Datagrams from peers by result: ok, old (reordered, or an earlier state of the router), replayed, forged (no known key opens it), outside (sender not in peers.allow), garbage, unknown_version."}
	PeerStreams  = &Def{"penstock_peer_streams_total", Counter, []string{"result"}, "Push/pull states from peers by result: ok, outside, forged, garbage."}
	PeerBytes    = &Def{"penstock_peer_bytes_total", Counter, []string{"direction"}, "Bytes of peer datagrams and streams, by direction: in, out."}
	PeerMembers  = &Def{"penstock_peers", Gauge, []string{"state"}, "Other routers by state: fresh (its account is in use), silent (a member whose account has expired), lost (gone without leaving)."}
	PeerShare    = &Def{"penstock_peer_share_ratio", Gauge, nil, "Share of the last known routers whose accounts this one knows, itself included; under 1 it takes only its fair share."}
	PeerDrift    = &Def{"penstock_peer_config_drift", Gauge, nil, "Fresh peers whose configuration differs from this router's."}
	PeerUnknown  = &Def{"penstock_peer_unknown_replicas", Gauge, nil, "Replicas that peers account for and this router does not know."}
	PeerInterval = &Def{"penstock_peer_interval_seconds", Gauge, nil, "Time between two sends of this router's account; longer than configured when the bandwidth bound holds."}
	BuildInfo    = &Def{"penstock_build_info", Gauge, []string{"version"}, "1, with the version as a label."}
	ReloadTotal  = &Def{"penstock_config_reloads_total", Counter, []string{"result"}, "Configuration reloads by result: ok, refused."}
	// Routes, tiers and services (issue: the degradation ladder).
	RouteState      = &Def{"penstock_route_state", Gauge, []string{"route", "state"}, "1 for the state the route is in: PRIMARY_HEALTHY, DEGRADED_FALLBACK, RECOVERING_PROBE; else 0."}
	RouteChanges    = &Def{"penstock_route_state_changes_total", Counter, []string{"route", "state"}, "Changes of a route into a state."}
	TierAnswers     = &Def{"penstock_tier_answers_total", Counter, []string{"route", "tier"}, "Answers by the tier that gave them: 0, 1, 2, cached, static, 3, 4 (4 = refused honestly)."}
	TierValidated   = &Def{"penstock_tier_validated", Gauge, []string{"route", "pool", "model"}, "1 while a tier that is a smaller model may be used; 0 when its last validation failed, is over 24 h old, or was never run."}
	RecoveryStalled = &Def{"penstock_recovery_probe_stalled", Gauge, []string{"route"}, "1 while ALERT_RECOVERY_PROBE_STALLED holds: the route's primary is well for over 60 s and still has not its full share back."}
	RetryStorms     = &Def{"penstock_retry_storms_total", Counter, nil, "Repeats refused with ERR_RETRY_STORM_DETECTED."}
	RateLimited     = &Def{"penstock_rate_limited_total", Counter, nil, "Requests refused by a tenant's own limit (rate or requests at a time)."}
	UnknownClass    = &Def{"penstock_unknown_class_total", Counter, nil, "Requests whose X-Request-Class names none of the classes; they were served as if it were not there, and their lines in the log have unknown_class."}
	TenantPlaces    = &Def{"penstock_tenant_requests_in_flight", Gauge, nil, "Requests that tenants' limits count as in the router now, all tenants together."}
	ServiceRequests = &Def{"penstock_service_requests_total", Counter, []string{"service", "result"}, "Requests to auxiliary services by result: ok, error, refused (breaker open or limit)."}
	SpansDropped    = &Def{"penstock_spans_dropped_total", Counter, nil, "Spans that the collector did not take, or that found the queue full."}
	CacheBytes      = &Def{"penstock_answer_cache_bytes", Gauge, nil, "Answers held for the cached tier."}
	PanicMode       = &Def{"penstock_panic_picks_total", Counter, []string{"pool"}, "Placements on an ejected replica (fail-open): every replica was ejected, or more than half and the rest had no room."}
)

// Defs lists the table in the order of docs/metrics.md. Every Def has to be in it.
var Defs = []*Def{Requests, Outcomes, Attempts, DeadlineLeft, Failovers, Sheds, Cancellations, InFlight, HeldRequests, HeldTokens,
	ReplicaFlight, ReplicaPrefill, ReplicaKV, ReplicaState, ReplicaShare, ReplicaWaiting, ReplicaRunning, ReplicaKVUsage, ReplicaPreempt, PoolHeadroom, Ejections,
	TokensIn, TokensCached, TokensOut, TokensWasted, UsageEstimated, Integrity, TTFT, ITL, E2E, HoldTime, PredictRatio, ScalePrefill, ScaleDecode,
	GoodRequests, ScrapeAge, Scrapes, ScrapeSeconds, Probes,
	PeerDatagrams, PeerStreams, PeerBytes, PeerMembers, PeerShare, PeerDrift, PeerUnknown, PeerInterval, BuildInfo, ReloadTotal,
	RouteState, RouteChanges, TierAnswers, TierValidated, RecoveryStalled, RetryStorms, RateLimited, UnknownClass, TenantPlaces, ServiceRequests, SpansDropped, CacheBytes, PanicMode}
