'use strict';
// Everything that comes from the router is put in as text, never as markup:
// model, tenant and request names come from clients.

const el = (tag, cls, ...kids) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  e.append(...kids.filter(k => k !== null && k !== undefined && k !== ''));
  return e;
};
const td = (cls, ...kids) => el('td', cls, ...kids);
const byId = id => document.getElementById(id);
const body = id => document.querySelector('#' + id + ' tbody');
const none = '–';

const count = x => x === null ? none : x >= 1e6 ? (x / 1e6).toFixed(1) + 'M' : x >= 1e4 ? (x / 1e3).toFixed(1) + 'k' : String(Math.round(x));
const secs = x => x === null ? none : x === 0 ? '0' : x < 1 ? (x * 1000).toFixed(x < 0.01 ? 1 : 0) + ' ms' : x < 120 ? x.toFixed(x < 10 ? 2 : 1) + ' s' : x < 7200 ? (x / 60).toFixed(0) + ' min' : (x / 3600).toFixed(1) + ' h';
const share = x => x === null ? none : Math.round(100 * x) + ' %';
const factor = x => x === null ? none : x.toFixed(2);

const stateClass = { up: 'good', ramping: 'info', busy: 'warn', trial: 'info', ejected: 'bad', draining: 'warn' };
const verdictClass = { placed: 'good', held: 'info', shed: 'bad' };

function bar(x) {
  if (x === null) return none;
  const i = el('i');
  i.style.width = Math.round(100 * Math.min(1, Math.max(0, x))) + '%';
  return el('span', '', el('span', 'bar', i), share(x));
}

function fill(id, rows, columns, empty) {
  body(id).replaceChildren(...(rows.length ? rows : [el('tr', '', Object.assign(td('empty', empty), { colSpan: columns }))]));
}

async function get(path) {
  const r = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (!r.ok) throw new Error(path + ': ' + r.status);
  return r.json();
}

function showStatus(s) {
  byId('version').textContent = s.version;
  const ready = byId('ready');
  ready.textContent = s.ready ? 'ready' : 'not ready';
  ready.className = 'chip ' + (s.ready ? 'good' : 'bad');
  const why = (s.readiness && s.readiness.pools || []).filter(p => !p.ready && p.why).map(p => p.pool + ': ' + p.why);
  byId('facts').textContent = [secs(s.uptime_seconds) + ' up', s.in_flight + ' in flight', ...why].join(' · ');
  byId('inflight-n').textContent = '(' + s.in_flight + ')';
}

function showPools(pools) {
  const words = o => Object.entries(o).sort().map(([k, n]) => k + ' ' + count(n)).join(', ') || none;
  const silent = l => l.slice(0, 3).map(w => w.name + (w.error ? ' (' + w.error + ')' : '')).join(', ') + (l.length > 3 ? ' and ' + (l.length - 3) + ' more' : '');
  fill('pools', pools.map(p => el('tr', '',
    td('', p.name), td('', p.models.join(', ') || none, p.aliases.length ? el('span', 'dim', ' also ' + p.aliases.join(', ')) : null),
    td('', words(p.states), p.never_answered.length ? el('span', 'dim', ' never answered: ' + silent(p.never_answered)) : null),
    td('n', count(p.held_requests), p.held_requests ? el('span', 'dim', ' ' + count(p.held_tokens) + ' tokens') : null),
    td('n', p.drain_tokens_per_second === null ? none : count(p.drain_tokens_per_second) + '/s'), td('n', count(p.placed)), td('n', count(p.finished)),
    td('n', count(p.failed)), td('n', count(p.cancelled)), td('', words(p.shed)))), 10, 'no pool is configured');
}

async function drain(r, on) {
  if (on && !confirm('Drain ' + r.name + '? It gets nothing new; what runs there may finish.')) return;
  const a = await fetch('/admin/v1/replicas/' + r.id + (on ? '/drain' : '/undrain'), { method: 'POST' });
  if (!a.ok) alert('The router answered ' + a.status + ': ' + (await a.json()).error.message);
  refresh();
}

function showReplicas(list) {
  const labelled = list.map(r => {
    const s = r.sample, l = r.learned, on = r.state !== 'draining';
    const b = el('button', '', on ? 'drain' : 'end drain');
    b.onclick = () => drain(r, on);
    const why = [r.reason === r.state ? '' : r.reason, r.state_ends_in_seconds === null ? '' : 'for ' + secs(r.state_ends_in_seconds)].filter(Boolean).join(', ');
    const old = s.age_seconds !== null && s.age_seconds > 2 || s.broken;
    const off = l && l.ttft_observed_over_predicted !== null && (l.ttft_observed_over_predicted > 2 || l.ttft_observed_over_predicted < 0.5);
    return el('tr', '',
      td('', r.name, r.scrape.error ? el('div', 'err', r.scrape.error) : null), td('', r.pool),
      td('', el('span', 'chip ' + (stateClass[r.state] || ''), r.state), why ? el('span', 'dim', ' ' + why) : null),
      td('', bar(r.share)),
      td('n', count(r.account.requests), r.account.prefilling ? el('span', 'dim', ' (' + r.account.prefilling + ' prefilling)') : null),
      td('n', count(r.account.prefill_tokens)), td('n', count(r.account.kv_tokens)),
      td('n', count(s.running) + ' / ' + count(s.waiting)), td('', bar(s.kv_usage)),
      td('n ' + (old ? 'bad' : ''), secs(s.age_seconds)),
      td('n ' + (off ? 'warn' : ''), l && l.first_tokens ? secs(l.ttft_predicted_seconds) + ' / ' + secs(l.ttft_observed_seconds) : none),
      td('n', l ? factor(l.prefill_scale) + ' / ' + factor(l.decode_scale) : none), td('', b));
  });
  fill('replicas', labelled, 13, 'no replica is known');
}

const open = new Set(); // decisions that are unfolded, by what names them
function showDecisions(list) {
  const rows = [];
  for (const d of list) {
    const key = d.request + '/' + d.attempt + '/' + d.verdict;
    const row = el('tr', 'row', td('n', secs(d.seconds_ago)), td('', d.request), td(verdictClass[d.verdict] || '', d.verdict + (d.attempt > 1 ? ', attempt ' + d.attempt : '')),
      td('', d.replica || d.reason || none), td('', d.class), td('n', count(d.prompt_tokens)), td('n', count(d.hit_tokens)),
      td('n', secs(d.ttft_predicted_seconds)), td('n', secs(d.ttft_observed_seconds)), td('n', secs(d.own_seconds)), td('n', secs(d.harm_seconds)), td('n', secs(d.held_seconds)));
    row.onclick = () => { open.has(key) ? open.delete(key) : open.add(key); showDecisions(list); };
    rows.push(row);
    if (!open.has(key)) continue;
    const head = el('tr', '', ...['replica', 'state', 'requests', 'prefill tokens', 'KV tokens', 'TTFT', 'own', 'harm', 'hit', 'cost'].map(t => el('th', '', t)));
    const inner = el('table', '', el('thead', '', head), el('tbody', '', ...d.candidates.map(c => el('tr', '',
      td(c.replica === d.replica ? 'good' : '', c.replica), td('', c.state), td('n', count(c.requests)), td('n', count(c.prefill_tokens)), td('n', count(c.kv_tokens)),
      td('n', secs(c.ttft_seconds)), td('n', secs(c.own_seconds)), td('n', secs(c.harm_seconds)), td('n', count(c.hit_tokens)), td('n', secs(c.cost_seconds))))));
    rows.push(el('tr', 'more', Object.assign(td('', d.candidates.length ? inner : 'no replica was a candidate'), { colSpan: 12 })));
  }
  fill('decisions', rows, 12, 'no decision yet');
}

function showRequests(r) {
  fill('requests', r.requests.map(q => el('tr', '', td('n', secs(q.age_seconds)), td('', q.id), td('', q.path), td('', q.model), td('', q.tenant || none), td('', q.class),
    td('', q.phase), td('', q.replica || none), td('n', count(q.prompt_tokens)), td('n', count(q.output_tokens)))), 10, 'none');
}

async function showConfig() {
  if (byId('config').open) document.querySelector('#config pre').textContent = JSON.stringify((await get('/admin/v1/config')).config, null, 2);
}
byId('config').ontoggle = () => showConfig().catch(() => {});

async function refresh() {
  try {
    const [s, p, r, d, q] = await Promise.all([get('/admin/v1/status'), get('/admin/v1/pools'), get('/admin/v1/replicas'), get('/admin/v1/decisions?n=30'),
      byId('inflight').open ? get('/admin/v1/requests') : null]);
    byId('configError').hidden = !s.config_error;
    byId('configError').textContent = 'the newest configuration was refused, the last good one is in force: ' + s.config_error;
    showStatus(s); showPools(p.pools); showReplicas(r.replicas); showDecisions(d.decisions);
    if (q) showRequests(q);
    byId('stale').hidden = true;
  } catch (e) {
    byId('stale').hidden = false; // what is on the page is old: say so instead of looking alive
    byId('stale').title = String(e);
  }
}

// Rows are replaced at each refresh: not under a pressed button or a selection.
let pressed = false;
addEventListener('pointerdown', () => { pressed = true; });
for (const e of ['pointerup', 'pointercancel', 'blur']) addEventListener(e, () => { pressed = false; });
const busy = () => pressed || String(getSelection()) !== '';

(async () => {
  for (;;) {
    if (!byId('pause').checked && !document.hidden && !busy()) await refresh();
    await new Promise(done => setTimeout(done, 1000));
  }
})();
