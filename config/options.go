package config

// Option describes one setting. Path is where it stands in the file; [] marks
// an element of a list.
type Option struct {
	Path    string
	Default string // as written in the file; "" = none
	Doc     string // what it does and, for a default, why that
	Pending bool   // known to the design, not honoured by this version: refused, never ignored
	Live    bool   // a reload applies it; others need a restart. cmd/router's test holds this and what is applied together
}

// Options is the table of all settings: defaults are taken from it, and
// docs/configuration.md is generated from it. A test holds it and the fields
// of Config together.
var Options = []Option{
	{Path: "listen", Default: ":8080", Doc: "Address of the public listener: the inference API, /healthz, /readyz."},
	{Path: "admin", Default: "127.0.0.1:9090", Doc: "Address of the admin listener: /metrics, the console, /admin/v1/, /debug/pprof/. It asks for no credentials, so it is on the loopback unless you say otherwise. \"off\" = none."},
	{Path: "admin_hosts", Live: true, Doc: "Further host names by which the admin listener may be asked. A browser that was led here under another name (DNS rebinding) gets 421. Always taken: localhost, IP addresses, this machine's host name and the host of admin; /healthz and /readyz under any name."},

	{Path: "pools[].name", Doc: "The pool's name, in metrics, logs and tiers. Required, unique."},
	{Path: "pools[].models", Live: true, Doc: "Model names that the pool serves. Asked from the replicas when left out."},
	{Path: "pools[].aliases", Live: true, Doc: "Further names by which clients may ask; the name is rewritten to the pool's first model. A list, or a mapping from alias to model."},
	{Path: "pools[].replicas.static", Live: true, Doc: "Replica URLs: the server's root (http://host:8000), without /v1. A base path is kept. host:port alone means http."},
	{Path: "pools[].replicas.file", Doc: "A file in Prometheus file_sd format (JSON or YAML), watched: targets are host:port or a URL, the label __scheme__ is heeded, region and domain are taken over the pool's."},
	{Path: "pools[].replicas.http", Doc: "URL of a Prometheus http_sd endpoint, asked every 30 s."},
	{Path: "pools[].replicas.dns.name", Doc: "A DNS name whose addresses are the replicas, asked again every 15 s."},
	{Path: "pools[].replicas.dns.type", Default: "A", Doc: "Record type: A, AAAA or SRV."},
	{Path: "pools[].replicas.dns.port", Default: "8000", Doc: "Port of each replica (vLLM's default); SRV records bring their own."},
	{Path: "pools[].replicas.kubernetes", Pending: true, Doc: "EndpointSlices of a service: {namespace, service}. Until then use dns with the headless service's name."},
	{Path: "pools[].labels", Live: true, Doc: "Labels of all its replicas. region is used by routes, domain is the failure domain."},
	{Path: "pools[].profile.base", Doc: "Cost model of the replicas: a name from the profile table (profile: NAME does too). The keys beside it replace single values. Left out: a generic one, corrected by what is learned from answers."},
	{Path: "pools[].profile.per_step", Doc: "Time of one engine step whatever is in it, as 6.4ms."},
	{Path: "pools[].profile.per_prefill", Doc: "Time per prompt token computed, as 16.8us."},
	{Path: "pools[].profile.per_seq", Doc: "Time per decoding sequence in a step, as 11.3us."},
	{Path: "pools[].profile.per_kv", Doc: "Time per KV token read in a step, as 42ns."},
	{Path: "pools[].profile.per_attn", Doc: "Time per pair of chunk token and context token, as 1.84ns."},
	{Path: "pools[].profile.kv_tokens", Doc: "KV-cache capacity of one replica, tokens. The scraped size, where a replica tells it, is used instead."},
	{Path: "pools[].profile.max_seqs", Doc: "Most sequences running at once (vLLM's --max-num-seqs)."},
	{Path: "pools[].profile.max_batched", Doc: "Most tokens in one step (vLLM's --max-num-batched-tokens)."},
	{Path: "pools[].profile.block_tokens", Doc: "Tokens in one KV block (vLLM's default on CUDA). The scraped size is used instead where a replica tells it."},
	{Path: "pools[].profile.max_model_len", Doc: "Longest prompt + output that a replica takes, tokens. Left out: as it says itself."},
	{Path: "pools[].headroom", Default: "0%", Live: true, Doc: "Share of token-work, and of the first class's objectives, that the lower classes leave free for it: n-1 (what the loss of the largest replica would need) or a share. With 0%, the default, they leave at each busy replica just what those above them need: the tightest `itl`, and most of the tightest `ttft` of the classes above; more makes the first class faster, and lets it grow at once."},
	{Path: "pools[].objective.ttft", Live: true, Doc: "Time to first token that a request has to get to be of use, as 500ms: one that no replica can give it now is held, and shed when it can be met no more. Left out: nothing is shed for being late, and requests are held by a generous guess (2s, and 1s for each 1,000 prompt tokens)."},
	{Path: "pools[].objective.ttft_per_1k", Live: true, Doc: "Added to ttft for each 1,000 prompt tokens, as 120ms: a long prompt cannot begin as soon as a short one."},
	{Path: "pools[].objective.itl", Live: true, Doc: "Mean gap between two tokens that a request has to get, as 50ms (20 tokens a second, faster than people read)."},
	{Path: "pools[].api_key", Live: true, Doc: "Key sent to the replicas as Authorization: Bearer. Prefer api_key_file, or ${NAME} from the environment. api_key_file: PATH reads it from a file."},
	{Path: "pools[].policy", Doc: "How a replica is chosen. Left out: the work-aware cost model. `penstock version` lists the names; the others are there to compare."},
	{Path: "pools[].shadow", Doc: "A second policy that decides too, and does not act: how often it chose the same replica is in /admin/v1/pools."},
	{Path: "pools[].concurrency", Default: "0", Live: true, Doc: "Most requests at one replica, the other routers' included; 0 = no cap but what the objective, KV cache and max_seqs allow."},

	{Path: "pools[].abilities", Doc: "What its replicas can do beside text, of tools, images, audio, video: a request that needs another one never goes there. Left out: everything; the replica's own refusal is passed on then. [] = nothing but text."},
	{Path: "pools[].side_effects", Default: "false", Doc: "Its replicas act outside of the answer (they run tools themselves): a request that one may have begun is not tried again, unless it carries an Idempotency-Key."},

	{Path: "classes[].name", Doc: "The class's name, as in X-Request-Class. The first class is the most important, and that of requests that name none, or one that is not there (counted: penstock_unknown_class_total): a client can lower its class, never raise it. Without classes there is one, named standard."},
	{Path: "classes[].wait", Default: "30s", Live: true, Doc: "How long a request may be held at the router before it is shed. 0s = never held."},
	{Path: "classes[].deadline", Default: "5m", Live: true, Doc: "Deadline of a request that names none (X-Request-Timeout-Ms); covers waiting, every attempt and the answer: a stream that runs then ends with the event deadline_exceeded. With the official SDKs' X-Stainless-Read-Timeout that one holds until the answer begins, since it bounds each wait for bytes; what runs on has until the later of both."},
	{Path: "classes[].min_share", Default: "2%", Live: true, Doc: "Share of the work that the class gets however busy those above it are, so that it never starves. Not heeded for the first class."},
	{Path: "classes[].objective.ttft", Live: true, Doc: "As pools[].objective.ttft, for this class; left out: the pool's."},
	{Path: "classes[].objective.ttft_per_1k", Live: true, Doc: "As pools[].objective.ttft_per_1k, for this class; left out: the pool's."},
	{Path: "classes[].objective.itl", Live: true, Doc: "As pools[].objective.itl, for this class; left out: the pool's."},
	{Path: "classes[].exact", Default: "false", Doc: "No tier changes the prompts of this class: reduce.drop_tools is not done (reduce.max_tokens is)."},
	{Path: "classes[].defer", Default: "false", Pending: true, Doc: "Requests that cannot be placed become durable jobs."},

	{Path: "routes[].model", Doc: "The name that clients ask for whose ladder this is: a model, an alias or a new name. Requests by another name of the same model do not go by it."},
	{Path: "routes[].budget", Default: "1s", Doc: "Time until an answer begins, whole ladder included. One that is no stream begins when all of it is made: for such clients it has to be as long as their answers take."},
	{Path: "routes[].regions", Doc: "Regions (pools' label region) that may serve it; none = all."},
	{Path: "routes[].degrade.first_byte_p95", Doc: "Also leave the first tier when the 95th percentile of the time to the first byte is over this."},
	{Path: "routes[].degrade.fail_share", Default: "15%", Doc: "Leave the first tier when so many attempts fail, over window and at least 20 attempts."},
	{Path: "routes[].degrade.window", Default: "30s", Doc: "The time that fail_share and first_byte_p95 are taken over."},
	{Path: "routes[].degrade.healthy_for", Default: "30s", Doc: "Good health evidence for so long before trial traffic begins."},
	{Path: "routes[].degrade.again_for", Default: "60s", Doc: "After a bad trial: so much longer in fallback."},
	{Path: "routes[].degrade.trial_share", Default: "2%", Doc: "Share of traffic that is trial (at least 1 request a second)."},
	{Path: "routes[].degrade.min_attempts", Default: "20", Doc: "So few attempts in the window prove nothing: fail_share and first_byte_p95 are looked at from here on."},
	{Path: "routes[].degrade.trial_rate", Default: "1", Doc: "Trials a second at least, however small trial_share makes them."},
	{Path: "routes[].degrade.trials", Default: "5", Doc: "Good trials that end the trial. With 1 a second this and healthy_for fit into 45 s."},
	{Path: "routes[].degrade.trial_success", Default: "99.5%", Doc: "Share of the trials that has to succeed."},
	{Path: "routes[].degrade.ramp_from", Default: "25%", Doc: "Share of the traffic that the first tier gets at once after the trial."},
	{Path: "routes[].degrade.ramp", Default: "5s", Doc: "Until it has all."},
	{Path: "routes[].degrade.stalled_after", Default: "60s", Doc: "Good health evidence for so long, and the route is not back: ALERT_RECOVERY_PROBE_STALLED."},
	{Path: "routes[].tiers[].pool", Doc: "Tier: this pool."},
	{Path: "routes[].tiers[].model", Doc: "With pool: the model asked of it, when it is another than the route's."},
	{Path: "routes[].tiers[].limit", Doc: "With pool: time until an answer of this tier begins, after which the next is tried. Left out: half of what is left of budget while another pool follows, else all of it."},
	{Path: "routes[].tiers[].validate.prompts", Doc: "File with prompts and checks that the fallback pool has to pass: one JSON object a line, {\"prompt\": \"...\", \"contains\": \"...\"}, or messages (as in a chat request) in place of prompt. An answer without the text of contains is a fail."},
	{Path: "routes[].tiers[].validate.pass", Default: "95%", Doc: "Share of the checks that has to pass."},
	{Path: "routes[].tiers[].validate.every", Default: "12h", Doc: "How often the validation is to be repeated. The router does not repeat it: let a timer run penstock validate-fallbacks --due often (hourly), which tries what is older than this or out of use. check and the log warn of a pass that is older. A pass holds for 24 h; a fail takes the tier out of use at once, and while no replica can be asked the last result stays."},
	{Path: "routes[].tiers[].reduce.max_tokens", Doc: "Tier: the pool before it with at most so many output tokens. Taken when the pool has no room, or the prompt leaves none."},
	{Path: "routes[].tiers[].reduce.drop_tools", Default: "false", Doc: "Also leave out the tools of a chat request that may do without (no tool_choice that asks for one, no tool call in its messages)."},
	{Path: "routes[].tiers[].cached.scope", Default: "tenant", Doc: "Tier: an earlier answer to the very same request, of the same tenant, or shared."},
	{Path: "routes[].tiers[].cached.staleness", Default: "4h", Doc: "Oldest answer used; at most 4h for a tenant's own, 24h for shared."},
	{Path: "routes[].tiers[].static.file", Doc: "Tier: a fixed answer, read at load: a file with a whole chat.completion as a replica sends it (JSON). Clients that ask for a stream get it as one."},
	{Path: "routes[].tiers[].defer", Default: "false", Pending: true, Doc: "Tier: a durable job, answered 202."},

	{Path: "attempts.per_request", Default: "2", Doc: "Most attempts of one request that reach a replica. One repeat hides a single fault; more multiply an outage."},
	{Path: "attempts.budget", Default: "20%", Doc: "Most attempts beyond the first, as a share of the pool's requests over the last 10 s. Keeps an outage from doubling the load."},
	{Path: "attempts.min_per_second", Default: "3", Doc: "Repeats per second allowed whatever the share says, for quiet pools."},

	{Path: "limits.max_body", Default: "32MiB", Doc: "Largest request body; over it 413. Room for a few images in base64."},
	{Path: "limits.max_header", Default: "16KiB", Doc: "Largest request head, and replica's answer head; over it 431. vLLM itself takes 64 KiB; 16 KiB leaves room for long JWTs."},
	{Path: "limits.receive_bytes", Default: "1GiB", Doc: "Bytes of large request bodies (over 64KiB) that are being received at a time, by their declared length; over it 503 concurrency_limit. Bounds what clients cost that declare much and send slowly. At least max_body."},
	{Path: "limits.max_in_flight", Default: "65536", Live: true, Doc: "Requests inside the router, held ones included; over it 503 concurrency_limit."},
	{Path: "limits.max_connections", Default: "262144", Doc: "Client connections; over it new ones are answered 503 concurrency_limit and closed. Never more than half of the files that the process may open, since each may need another connection to a replica: see LimitNOFILE in deploy/penstock.service."},
	{Path: "limits.buffer_answer", Default: "1MiB", Doc: "How much of an answer that is not a stream is held back until it is whole, so that a replica's death in it can still fail over."},
	{Path: "limits.held_requests", Default: "10000", Live: true, Doc: "Most requests held per pool; over it the least important, newest first, are shed."},
	{Path: "limits.held_bytes", Default: "256MiB", Live: true, Doc: "Most bytes of request bodies held per pool; over it as held_requests."},

	{Path: "timeouts.header", Default: "10s", Doc: "Reading a request's head, and the first bytes of a new connection."},
	{Path: "timeouts.body", Default: "60s", Doc: "Reading a request's body in all."},
	{Path: "timeouts.idle", Default: "75s", Doc: "An idle client connection is closed (nginx's keepalive_timeout)."},
	{Path: "timeouts.write", Default: "30s", Doc: "One write to a client that does not read."},
	{Path: "timeouts.connect", Default: "2s", Doc: "Connecting to a replica."},
	{Path: "timeouts.first_token", Default: "10s", Doc: "Wait for an attempt's first content before another replica is tried; at least four times the predicted TTFT, never past the request's deadline. The status 200 alone proves nothing: vLLM sends it before it queues."},
	{Path: "timeouts.answer", Default: "0s", Doc: "first_token for answers that come in one piece, which begin only when all tokens are made. 0s = the request's deadline."},
	{Path: "timeouts.stall", Default: "60s", Doc: "A stream that began and brought no byte for so long is ended with an error event."},
	{Path: "timeouts.upstream_idle", Default: "3s", Doc: "How long an idle connection to a replica is used again; vLLM closes idle ones after exactly 5 s."},
	{Path: "timeouts.drain_delay", Default: "5s", Live: true, Doc: "After SIGTERM: time that /readyz says 503 while new requests are still served, so that the balancer notices first. Its health interval decides."},
	{Path: "timeouts.drain_timeout", Default: "2m", Live: true, Doc: "After drain_delay: time that running answers get to finish. It leaves early when all are done."},

	{Path: "scrape.interval", Default: "250ms", Doc: "Time between two readings of a replica's /metrics, spread by a hash of its name. Own accounts lead, so a longer one costs little; a shorter one burdens vLLM, whose page takes 18 ms and up."},
	{Path: "scrape.timeout", Default: "1s", Doc: "One reading; a loaded vLLM took up to 374 ms."},
	{Path: "scrape.max_page", Default: "4MiB", Doc: "Largest page read; a real one has 50 to 75 KB."},

	{Path: "health.probe_interval", Default: "1s", Doc: "Time between two GET /health."},
	{Path: "health.probe_timeout", Default: "2s", Doc: "One probe."},
	{Path: "health.hang_after", Default: "4s", Live: true, Doc: "A replica with outstanding work that brings no byte and moves no counter for so long is taken as hung; its /health keeps saying 200."},

	{Path: "tenants.header", Default: "X-Sandbox-ID", Doc: "Request header with the tenant's sandbox, echoed on every answer."},
	{Path: "tenants.keys_file", Pending: true, Doc: "Hashed API keys → tenant, class, models, limits."},
	{Path: "tenants.jwt", Pending: true, Doc: "JWT issuer, keys, audience and tenant claim."},
	{Path: "tenants.limits.rate", Doc: "Requests of one tenant, as 20/s; over it 429 rate_limited. Left out: no limit."},
	{Path: "tenants.limits.burst", Doc: "Requests at once above the rate. Left out: one second's worth."},
	{Path: "tenants.limits.parallel", Doc: "Requests of one tenant in the router at a time. Left out: no limit."},
	{Path: "tenants.limits.tokens", Pending: true, Doc: "Tokens of one tenant, as 2M/h."},
	{Path: "tenants.store", Pending: true, Doc: "Where budgets are kept: memory or redis://."},

	{Path: "forward.client_auth", Default: "false", Doc: "Send the client's own Authorization and x-api-key on to replicas that have no api_key. Off: a client's credentials never leave the router unasked."},
	{Path: "forward.trust_forwarded_for", Default: "false", Doc: "Append to the X-Forwarded-For that came, instead of replacing it. Only behind a proxy of your own: anyone can write the header."},
	{Path: "forward.show_replica", Default: "false", Doc: "Add X-Penstock-Replica with the replica's name to answers. Off: clients need not know the fleet."},

	{Path: "tls.cert_file", Live: true, Doc: "Certificate chain (PEM) of the public listener; read again on reload. Left out: plain HTTP."},
	{Path: "tls.key_file", Live: true, Doc: "Its private key (PEM)."},

	{Path: "log.level", Default: "info", Live: true, Doc: "debug, info, warn or error. The access log, one line for every request that ended and none left out, is at info; of other lines that repeat more than a hundred times a second only every hundredth is written. No level logs prompts, answers or keys."},
	{Path: "log.format", Default: "json", Doc: "json or console."},

	{Path: "integrity", Default: "auto", Doc: "What becomes of an answer that breaks its protocol. terminate: it ends with the event stream_integrity (before its first byte: the next replica is tried). observe: it is passed on, counted and, where it shows before the head leaves, marked with X-Stream-Integrity. auto ends those after which a client would act on what the model never said (two tool calls under one index, an id that changes, broken JSON or UTF-8) and observes those that other makes of engines may show while all is well (another model's name, no finish reason). A healthy stream is never altered."},
	{Path: "state_dir", Doc: "Folder of what has to outlive the process: what the last validation of each fallback has shown."},

	{Path: "services[].name", Doc: "An auxiliary HTTP service: its outage is 503 NAME_unavailable on its own path and touches no inference request."},
	{Path: "services[].prefix", Doc: "Requests whose path begins with it go there, path unchanged, as /retrieval/."},
	{Path: "services[].url", Doc: "Where it is, as http://host:port."},
	{Path: "services[].connections", Default: "64", Doc: "Most requests at it at a time; more are refused."},
	{Path: "services[].timeout", Default: "5s", Doc: "For a whole answer."},

	{Path: "tracing.otlp", Doc: "URL of an OTLP/HTTP trace collector, as http://collector:4318. It can be gone: spans are dropped and counted, no request waits."},

	{Path: "peers.name", Doc: "This router's name, one among all routers, kept over restarts. Left out: the host name."},
	{Path: "peers.bind", Default: ":7946", Doc: "Where to listen for peers, UDP and TCP (memberlist's usual port)."},
	{Path: "peers.advertise", Doc: "The IP or IP:port that peers are told. Left out: the address bound to, or the one the system sends from."},
	{Path: "peers.join", Doc: "Other routers: host, host:port, IP or IP:port. A name may stand for many addresses and is looked up again every 30 s; this router's own address in it does no harm."},
	{Path: "peers.key_file", Doc: "File with the gossip keys, one base64 key of 16, 24 or 32 bytes per line; the first encrypts, all decrypt. Read again every 5 s, so that keys can be changed without a restart. Required: peers only talk encrypted."},
	{Path: "peers.allow", Doc: "Networks that peers may be in, as 10.0.0.0/8. Left out: all."},
	{Path: "peers.interval", Default: "200ms", Doc: "Time between two sends of this router's account, 50ms to 1.4s. The correction of stale sums holds for much longer."},
	{Path: "peers.bandwidth", Default: "1000000", Doc: "Most bits per second of accounts to all peers together; the interval stretches to keep it."},
	{Path: "peers.hold_share", Default: "60s", Doc: "How long a router that went silent without leaving is left its share of the replicas: longer than most partitions last."},
	{Path: "deferral", Pending: true, Doc: "Durable jobs."},
	{Path: "audit", Pending: true, Doc: "The audit chain."},
}

// option returns the table's row for a schema path.
func option(path string) *Option {
	for i := range Options {
		if Options[i].Path == path {
			return &Options[i]
		}
	}
	return nil
}
