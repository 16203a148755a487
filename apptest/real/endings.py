"""The two endings of a real vLLM that a router can get wrong: its engine
process dies in the middle of streams, and its default SIGTERM, which ends all
that runs as a 200 with finish_reason "abort". See accept.py."""
import http.client
import json
import os
import signal
import threading
import time
import urllib.request


class Stream(threading.Thread):
    """One stream, read as raw events: an SDK would hide how it ended."""

    def __init__(self, port, model, n, max_tokens):
        super().__init__(daemon=True)
        self.port, self.replica, self.request_id = port, "", ""
        self.content, self.error, self.done, self.finish, self.broken, self.status = 0, None, False, None, "", 0
        self.body = json.dumps({"model": model, "stream": True, "max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": True,
                                "messages": [{"role": "user", "content": f"stream {n}: tell me about files and modules in the library"}]})

    def run(self):
        try:
            c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            c.request("POST", "/v1/chat/completions", self.body, {"Content-Type": "application/json"})
            r = c.getresponse()
            self.status, self.replica, self.request_id = r.status, r.getheader("x-penstock-replica") or "", r.getheader("x-request-id") or ""
            for line in r:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                    continue
                e = json.loads(data)
                if "error" in e:
                    self.error = e["error"]
                for ch in e.get("choices") or []:
                    self.finish = ch.get("finish_reason") or self.finish
                    self.content += bool((ch.get("delta") or {}).get("content"))
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.broken = f"{type(e).__name__}: {e}"

    def explicit(self):
        """Ended in the router's own error event, and in nothing that looks like an end."""
        return self.error is not None and self.error.get("code") == "upstream_stream_failed" and not self.done and not self.finish and not self.broken


def engine_killed(a, log_file):
    """The engine process (not the API server) is killed under running streams."""
    streams = [Stream(a.PUBLIC, a.MODEL, n, 600) for n in range(9)]
    for s in streams:
        s.start()
    a.wait(lambda: all(s.content > 3 for s in streams), 90, "all streams bring tokens")
    before = a.metric("penstock_requests_total", 'code="502"')
    by = {p: [s for s in streams if s.replica.endswith(f":{p}")] for p in a.PORTS}
    port = max(a.PORTS, key=lambda p: len(by[p]))
    _, procs = a.pids(port)
    engines = [pid for pid, args in procs if args.startswith("VLLM::EngineCore")]
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    a.say(f"replica {port}: engine killed ({len(engines)} processes, {len(by[port])} streams there), /health {a.get(f'http://127.0.0.1:{port}/health')[0]}")
    load = a.Load()
    for s in streams:
        s.join(150)
    time.sleep(3)
    load.end()
    cut = by[port]
    odd = [s for s in cut if not s.explicit()]
    a.check("engine killed: each stream there ends in an explicit error, without [DONE]", engines and cut and not odd,
            f"{len(cut) - len(odd)} of {len(cut)}" + (f"; first other: error {odd[0].error}, done {odd[0].done}, finish {odd[0].finish}, {odd[0].broken}" if odd else
                                                      f": {cut[0].error['code']}: {cut[0].error['message'][:60]}" if cut else ""))
    others = [s for p in a.PORTS if p != port for s in by[p]]
    a.check("engine killed: the other replicas' streams end well", all(s.done and s.finish == "length" and s.content for s in others), f"{len(others)} streams")
    grown = a.metric("penstock_requests_total", 'code="502"') - before
    a.check("engine killed: recorded as 502 in the metric", grown >= len(cut), f"{grown:.0f} for {len(cut)} streams")
    ids = {s.request_id for s in cut}
    logged = [r for r in records(log_file) if r.get("request_id") in ids]
    a.check("engine killed: recorded as 502 in the access log", len(logged) == len(ids) and all(r["status"] == 502 and r["code"] == "upstream_stream_failed" for r in logged),
            f"{len(logged)} of {len(ids)} lines, status {sorted({r['status'] for r in logged})}")
    load.report("engine killed, requests after it")
    a.restart(port)
    a.back_in_use("engine killed", port)


def records(log_file):
    with open(log_file) as f:
        for line in f:
            try:
                yield json.loads(line)
            except ValueError:
                pass


class Whole(threading.Thread):
    """One long answer in one piece: nobody has seen anything of it before its end."""

    def __init__(self, port, model, n, max_tokens):
        super().__init__(daemon=True)
        self.port, self.replica, self.status, self.finish, self.tokens, self.broken = port, "", 0, None, 0, ""
        self.body = json.dumps({"model": model, "max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": True,
                                "messages": [{"role": "user", "content": f"whole {n}: tell me about files and modules in the library"}]})

    def run(self):
        try:
            c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            c.request("POST", "/v1/chat/completions", self.body, {"Content-Type": "application/json"})
            r = c.getresponse()
            self.status, self.replica = r.status, r.getheader("x-penstock-replica") or ""
            e = json.loads(r.read())
            self.finish = (e.get("choices") or [{}])[0].get("finish_reason")
            self.tokens = (e.get("usage") or {}).get("completion_tokens", 0)
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.broken = f"{type(e).__name__}: {e}"

    def good(self):
        return self.status == 200 and self.finish == "length" and self.tokens > 0 and not self.broken


def drain(a, port, how):
    """The admin API's drain or undrain of one replica."""
    urllib.request.urlopen(urllib.request.Request(f"{a.ADMIN_URL}/admin/v1/replicas/127.0.0.1:{port}/{how}", method="POST"), timeout=10).read()


def aborted(a):
    """SIGTERM without --shutdown-timeout, vLLM's default: whatever runs or waits
    ends at once as 200 with finish_reason "abort", queued streams as [DONE] alone.
    Enough is sent that the replica has answers of which nobody has seen anything:
    whole ones, and streams that wait behind its max_num_seqs."""
    port = a.PORTS[0]
    a.restart(port, "--enable-auto-tool-choice --tool-call-parser hermes --max-num-seqs 4")
    warm = a.Load(clients=6)
    try:
        a.wait(lambda: a.state(port) == "up", 60, "the replica has its full share again")
    finally:
        warm.end()
    before = a.metric("penstock_failovers_total"), a.metric("penstock_failovers_total", 'reason="abort"')
    # All go to this one, however few the router would give it beside the others.
    others = [p for p in a.PORTS if p != port]
    for p in others:
        drain(a, p, "drain")
    wholes = [Whole(a.PUBLIC, a.MODEL, n, 120) for n in range(12)]
    streams = [Stream(a.PUBLIC, a.MODEL, n, 60) for n in range(9)]
    for w, s in zip(wholes, streams + [None] * 3):
        w.start()
        if s:
            s.start()
    # More than it runs at a time; and it works.
    here = f":{port}\""
    a.wait(lambda: a.metric("penstock_replica_requests_in_flight", here) >= 6 and any(s.content for s in streams), 90, "requests run and wait at the replica")
    for p in others:
        drain(a, p, "undrain")
    pid, _ = a.pids(port)
    begun = [s for s in streams if s.content]
    over = sum(1 for w in wholes if w.finish)
    os.kill(pid, signal.SIGTERM)
    a.say(f"replica {port}: SIGTERM, no --shutdown-timeout; {a.metric('penstock_replica_requests_in_flight', here):.0f} requests there, "
          f"{len(begun)} of {len(streams)} streams have begun, {over} of {len(wholes)} whole answers are over")
    for t in wholes + streams:
        t.join(300)
    # The listener closes at once: where a refused probe is there before the engine's "abort", the router takes its requests back by that.
    moved = a.metric("penstock_failovers_total") - before[0]
    told = a.metric("penstock_failovers_total", 'reason="abort"') - before[1]
    a.check('abort: answers that end as "abort", or would, fail over', moved >= len(wholes) - over,
            f"{moved:.0f} failovers, {told:.0f} of them for abort, the others by a refused probe before it")
    odd = [w for w in wholes if not w.good()]
    a.check("abort: each whole answer is one", not odd, f"{len(wholes) - len(odd)} of {len(wholes)}, {len(wholes) - over} of them not over at the SIGTERM" +
            (f"; first other: {odd[0].status} {odd[0].finish} {odd[0].broken}" if odd else ""))
    good = [s for s in streams if s.done and s.finish == "length" and s.content]
    cut = [s for s in streams if s.explicit() and s.content]  # one may have begun since it was looked at
    odd = [s for s in streams if s not in good and s not in cut]
    a.check('abort: each stream ends well, or had begun and ends in an explicit error; none as "abort"', not odd and len(good) > 0,
            f"{len(good)} of {len(streams)} well, {sum(1 for s in good if s not in begun)} of {len(streams) - len(begun)} of those that had not begun at the SIGTERM, {len(cut)} cut" +
            (f"; first other: error {odd[0].error}, done {odd[0].done}, finish {odd[0].finish}, {odd[0].broken}" if odd else ""))
    a.wait(lambda: a.get(f"http://127.0.0.1:{port}/health")[0] == 0, 60, "the replica is gone")
    a.restart(port)
    a.back_in_use("abort", port)
