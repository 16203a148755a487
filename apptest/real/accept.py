#!/usr/bin/env python3
"""Acceptance of the router against real vLLM replicas; see run.sh.

Prints one line per check and a table at the end; exits 1 when any failed.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import openai

import endings

PORTS = [int(p) for p in os.environ["RV_PORTS"].split()]
RV_SCRIPT, RV_ROOT = os.environ["RV_SCRIPT"], os.environ["RV_ROOT"]
PENSTOCK = os.environ["PENSTOCK"]
MODEL = os.environ.get("RV_NAME", "tiny")
PUBLIC, ADMIN = int(os.environ.get("PUBLIC_PORT", "8190")), int(os.environ.get("ADMIN_PORT", "8191"))
URL, ADMIN_URL = f"http://127.0.0.1:{PUBLIC}", f"http://127.0.0.1:{ADMIN}"
results = []  # (name, ok, detail)


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def check(name, ok, detail=""):
    results.append((name, bool(ok), detail))
    say(f"{'ok  ' if ok else 'FAIL'} {name}{': ' + detail if detail else ''}")


def attempt(name, call):
    """Runs a check that must not raise."""
    try:
        check(name, *call())
    except Exception as e:  # a failed check must not end the run
        check(name, False, f"{type(e).__name__}: {e}"[:300])


# ---- the router -------------------------------------------------------------

ROUTER_LOG = os.path.join(tempfile.gettempdir(), "penstock-real.log")


def start_router():
    log = open(ROUTER_LOG, "w")
    conf = tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False)
    urls = ", ".join(f'"http://127.0.0.1:{p}"' for p in PORTS)
    conf.write(f"""listen: "127.0.0.1:{PUBLIC}"
admin: "127.0.0.1:{ADMIN}"
pools:
  - name: real
    aliases: [chat-alias]
    replicas: {{static: [{urls}]}}
forward: {{show_replica: true}}
""")
    conf.close()
    p = subprocess.Popen([PENSTOCK, "serve", "--config", conf.name], stdout=log, stderr=log)
    say(f"router: pid {p.pid}, {URL}, log {log.name}")
    wait(lambda: get(URL + "/readyz")[0] == 200 and json.loads(get(URL + "/v1/models")[1])["data"], 30, "the router is ready")
    return p


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()
    except OSError:
        return 0, ""


def wait(cond, limit, what):
    end = time.time() + limit
    while time.time() < end:
        try:
            if cond():
                return True
        except (ValueError, KeyError):
            pass
        time.sleep(0.1)
    raise TimeoutError(f"not within {limit} s: {what}")


def metric(name, *labels):
    total = 0.0
    for line in get(ADMIN_URL + "/metrics")[1].splitlines():
        if (line.startswith(name + "{") or line.startswith(name + " ")) and all(l in line for l in labels):
            total += float(line.rsplit(" ", 1)[1])
    return total


def state(port):
    for line in get(ADMIN_URL + "/metrics")[1].splitlines():
        if line.startswith("penstock_replica_state{") and f":{port}\"" in line and line.endswith(" 1"):
            return line.split('state="')[1].split('"')[0]
    return "?"


# ---- the SDK ----------------------------------------------------------------

def sdk_checks(c):
    hi = [{"role": "user", "content": "Say something about import os and sys, please."}]

    def chat():
        r = c.chat.completions.create(model=MODEL, messages=hi, max_tokens=12)
        return r.choices[0].finish_reason in ("length", "stop") and r.usage.completion_tokens > 0, f"{r.usage.completion_tokens} tokens"

    def alias():
        r = c.chat.completions.create(model="chat-alias", messages=hi, max_tokens=4)
        return r.choices[0].message is not None, r.model

    def stream():
        n, finish, usage = 0, None, None
        for e in c.chat.completions.create(model=MODEL, messages=hi, max_tokens=12, stream=True, stream_options={"include_usage": True}):
            if e.choices:
                n += 1
                finish = e.choices[0].finish_reason or finish
            if e.usage:
                usage = e.usage
        return finish in ("length", "stop") and usage and usage.completion_tokens > 0, f"{n} events, finish {finish}"

    tools = [{"type": "function", "function": {"name": "get_weather", "description": "weather of a city",
              "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}}}]

    def tool_named():
        r = c.chat.completions.create(model=MODEL, messages=hi, tools=tools, max_tokens=64,
                                      tool_choice={"type": "function", "function": {"name": "get_weather"}})
        calls = r.choices[0].message.tool_calls
        return bool(calls) and calls[0].function.name == "get_weather", calls[0].function.arguments[:60] if calls else "none"

    def tool_stream():
        name = ""
        for e in c.chat.completions.create(model=MODEL, messages=hi, tools=tools, max_tokens=64, stream=True,
                                           tool_choice={"type": "function", "function": {"name": "get_weather"}}):
            for t in (e.choices[0].delta.tool_calls or []) if e.choices else []:
                name += t.function.name or ""
        return name == "get_weather", name

    def tool_auto():
        r = c.chat.completions.create(model=MODEL, messages=hi, tools=tools, max_tokens=16)
        return r.choices[0].message is not None, r.choices[0].finish_reason

    def completion():
        r = c.completions.create(model=MODEL, prompt="def main():", max_tokens=8)
        return r.usage.completion_tokens > 0, repr(r.choices[0].text)[:40]

    def completion_stream():
        n = sum(1 for _ in c.completions.create(model=MODEL, prompt="def main():", max_tokens=8, stream=True))
        return n > 1, f"{n} events"

    def models():
        ids = [m.id for m in c.models.list()]
        return MODEL in ids and "chat-alias" in ids and len(ids) == len(set(ids)), ", ".join(ids)

    def responses():
        r = c.responses.create(model=MODEL, input="hello there my friend, how are you", max_output_tokens=16)
        return r.id != "", r.status

    def raises(kind, status, call):
        try:
            call()
        except openai.APIStatusError as e:
            rid = e.response.headers.get("x-request-id")
            return isinstance(e, kind) and e.status_code == status and bool(rid), f"{e.status_code} {e.code} {str(e.message)[:80]}"
        return False, "no error"

    attempt("sdk: chat", chat)
    attempt("sdk: chat by alias", alias)
    attempt("sdk: chat stream with usage", stream)
    attempt("sdk: tool call, named", tool_named)
    attempt("sdk: tool call, streamed", tool_stream)
    attempt("sdk: tools, auto", tool_auto)
    attempt("sdk: completion", completion)
    attempt("sdk: completion stream", completion_stream)
    attempt("sdk: responses", responses)
    attempt("sdk: models", models)
    attempt("sdk: embeddings refused by this model", lambda: raises(openai.APIStatusError, 404, lambda: c.embeddings.create(model=MODEL, input="x")))
    attempt("sdk: unknown model", lambda: raises(openai.NotFoundError, 404, lambda: c.chat.completions.create(model="nobody", messages=hi)))
    attempt("sdk: prompt too long", lambda: raises(openai.BadRequestError, 400,
            lambda: c.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}])))
    attempt("sdk: bad parameter", lambda: raises(openai.BadRequestError, 400,
            lambda: c.chat.completions.create(model=MODEL, messages=hi, temperature=-3)))
    attempt("malformed JSON", malformed)


def malformed():
    req = urllib.request.Request(URL + "/v1/chat/completions", b'{"model": ', {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(req, timeout=10)
    except urllib.error.HTTPError as e:
        body = json.loads(e.read())
        return e.code == 400 and body["error"]["code"] == "invalid_request", body["error"]["message"][:80]
    return False, "no error"


def bench_serve(prompts=60, concurrency=8):
    out = os.path.join(tempfile.gettempdir(), "penstock-bench-serve.json")
    if os.path.exists(out):
        os.remove(out)
    cmd = [f"{RV_ROOT}/venv/bin/vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", URL,
           "--model", MODEL, "--tokenizer", f"{RV_ROOT}/model-tiny", "--dataset-name", "random", "--random-input-len", "96", "--random-output-len", "24",
           "--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--save-result", "--result-filename", out, "--disable-tqdm"]
    p = subprocess.run(cmd, capture_output=True, text=True, timeout=300, cwd=tempfile.gettempdir(),
                       env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    if not os.path.exists(out):
        return False, (p.stdout + p.stderr)[-300:]
    r = json.load(open(out))
    return r["failed"] == 0 and r["completed"] == prompts, (f"{r['completed']} of {prompts}, {r['failed']} failed, "
            f"{r['request_throughput']:.1f} req/s, median TTFT {r['median_ttft_ms']:.0f} ms")


# ---- faults under load ------------------------------------------------------

class Load:
    """A small closed-loop load that knows of each request whether its answer had begun."""

    def __init__(self, clients=6, whole=0.3, max_tokens=24):
        self.whole, self.max_tokens = whole, max_tokens  # share of answers in one piece
        self.stop_at, self.lock = None, threading.Lock()
        self.done = []  # (sent, stream, began, error, replica, silent cut)
        self.threads = [threading.Thread(target=self.client, args=(i,), daemon=True) for i in range(clients)]
        for t in self.threads:
            t.start()

    def client(self, i):
        c = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=120)
        n = 0
        while self.stop_at is None:
            n += 1
            sent, began, err, replica, cut = time.time(), False, None, "", False
            stream = (i + 3 * n) % 10 >= 10 * self.whole
            msg = [{"role": "user", "content": f"client {i} request {n}: tell me about files and modules in the library"}]
            try:
                if stream:
                    r = c.chat.completions.with_raw_response.create(model=MODEL, messages=msg, max_tokens=self.max_tokens, stream=True)
                    replica = r.headers.get("x-penstock-replica", "")
                    finish = None
                    for e in r.parse():
                        if e.choices and (e.choices[0].delta.content or e.choices[0].finish_reason):
                            began = True
                            finish = e.choices[0].finish_reason or finish
                    cut = finish not in ("length", "stop")  # ended without an error and without an end
                else:
                    r = c.chat.completions.with_raw_response.create(model=MODEL, messages=msg, max_tokens=self.max_tokens)
                    replica = r.headers.get("x-penstock-replica", "")
                    cut = r.parse().choices[0].finish_reason not in ("length", "stop")
            except Exception as e:  # every kind of failure is counted
                err = f"{type(e).__name__}: {e}"[:200]
            with self.lock:
                self.done.append((sent, stream, began, err, replica, cut))

    def end(self):
        self.stop_at = time.time()
        for t in self.threads:
            t.join(150)

    def report(self, name):
        total = len(self.done)
        before = [d for d in self.done if d[3] and not d[2]]
        after = [d for d in self.done if d[3] and d[2]]
        cut = [d for d in self.done if not d[3] and d[5]]
        spread = ", ".join(f"{p}: {sum(1 for d in self.done if d[4].endswith(f':{p}'))}" for p in PORTS)
        detail = f"{total} requests ({spread}), {len(before)} errors before the answer began, {len(after)} explicit errors after, {len(cut)} silent cuts"
        if before:
            detail += f"; first: {before[0][3]}"
        check(f"{name}: no client-visible error before the answer began", total > 3 and not before and not cut, detail)


def pids(port):
    pid = open(f"{RV_ROOT}/run/{port}.pid").read().strip()
    out = subprocess.run(["ps", "-o", "pid=,args=", "--sid", pid], capture_output=True, text=True).stdout
    return int(pid), [(int(l.split(None, 1)[0]), l.split(None, 1)[1]) for l in out.splitlines()]


def restart(port, args=None):
    say(f"replica {port}: restarting" + (f" with {args}" if args else ""))
    env = {**os.environ, "RV_ARGS": os.environ.get("RV_ARGS", "") if args is None else args}
    for verb in ("stop", "start", "wait"):
        subprocess.run(["bash", RV_SCRIPT, verb, str(port)], check=True, capture_output=True, env=env)


def attempts(port):
    return metric("penstock_attempts_total", f":{port}\"")


def busiest():
    """The replica that got most of the last 3 s: a fault where nothing runs proves nothing."""
    before = {p: attempts(p) for p in PORTS}
    time.sleep(3)
    took = {p: attempts(p) - before[p] for p in PORTS}
    say("attempts of the last 3 s: " + ", ".join(f"{p} {n:.0f}" for p, n in took.items()))
    return max(PORTS, key=lambda p: took[p])


def back_in_use(name, port):
    def look():
        n, t0 = attempts(port), time.time()
        load = Load()
        try:
            wait(lambda: attempts(port) > n + 2, 20, "it gets requests again")
        finally:
            load.end()
        load.report(f"{name}, after its return")
        return True, f"in use {time.time() - t0:.1f} s after it was healthy"
    attempt(f"{name}: the replica is used again", look)


def fault_kill():
    load = Load()
    time.sleep(2)
    port = busiest()
    _, procs = pids(port)
    for pid, _ in procs:
        os.kill(pid, signal.SIGKILL)
    say(f"replica {port}: killed ({len(procs)} processes)")
    time.sleep(8)
    n = attempts(port)
    time.sleep(4)
    late = attempts(port) - n
    load.end()
    load.report("kill -9")
    check("kill -9: the dead one is left alone", late <= 8, f"{late:.0f} attempts in 4 s (each a refused connection), state {state(port)}")
    restart(port)
    back_in_use("kill -9", port)


def fault_drain():
    load = Load()
    time.sleep(2)
    port = busiest()
    pid, _ = pids(port)
    os.kill(pid, signal.SIGTERM)
    say(f"replica {port}: SIGTERM with --shutdown-timeout")
    time.sleep(12)
    load.end()
    load.report("drain")
    began = [d for d in load.done if d[3] and d[2]]
    check("drain: running answers finish", not began, began[0][3] if began else "")
    wait(lambda: get(f"http://127.0.0.1:{port}/health")[0] == 0, 60, "the drained replica is gone")
    restart(port)
    back_in_use("drain", port)


def fault_hang():
    load = Load()
    time.sleep(2)
    port = busiest()
    _, procs = pids(port)
    stopped = [pid for pid, args in procs if args.startswith("VLLM::")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    t0 = time.time()
    say(f"replica {port}: SIGSTOP to {len(stopped)} engine processes, /health {get(f'http://127.0.0.1:{port}/health')[0]}")
    try:
        time.sleep(10)
        n = attempts(port)
        say(f"replica {port}: {state(port)} after 10 s")
        time.sleep(10)
        late = attempts(port) - n
        check("hang: avoided within 10 s", late <= 3, f"{late:.0f} attempts from 10 s to 20 s after it hung, state {state(port)}")
    finally:
        # Requests that began there hang with it until the router ends them.
        load.stop_at = time.time()
        time.sleep(5)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        say(f"replica {port}: SIGCONT after {time.time() - t0:.0f} s")
    load.end()
    load.report("hang")
    back_in_use("hang", port)


def main():
    router = start_router()
    try:
        # Retries by the SDK would hide what is looked for.
        sdk_checks(openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=60))
        attempt("vllm bench serve", bench_serve)
        me = sys.modules[__name__]
        for name, fault in (("kill -9", fault_kill), ("drain", fault_drain), ("hang", fault_hang),
                            ("engine", lambda: endings.engine_killed(me, ROUTER_LOG)), ("abort", lambda: endings.aborted(me))):
            if len(sys.argv) > 1 and name.split()[0] not in sys.argv[1:]:
                continue
            try:
                fault()
            except Exception as e:
                check(f"{name}: ran", False, f"{type(e).__name__}: {e}"[:300])
        attempt("accounts are back at zero", lambda: (wait(lambda: metric("penstock_requests_in_flight") == 0
                and metric("penstock_replica_requests_in_flight") == 0 and metric("penstock_replica_kv_tokens") == 0, 10, "zero"), ""))
    finally:
        router.send_signal(signal.SIGTERM)
        try:
            check("the router leaves with status 0", router.wait(30) == 0)
        except subprocess.TimeoutExpired:
            router.kill()
            check("the router leaves with status 0", False, "not within 30 s of SIGTERM")
    width = max(len(n) for n, _, _ in results)
    print("\n" + "-" * (width + 40))
    for name, ok, detail in results:
        print(f"{'ok  ' if ok else 'FAIL'} {name:{width}}  {detail}")
    failed = sum(1 for _, ok, _ in results if not ok)
    print(f"\n{len(results)} checks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
