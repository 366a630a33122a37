// The page that shows training, votes, and expelled or suspended peers. One event stream brings all live data.
import { allAt, at, html, paintStatus, render } from "/static/page.js";
import { call } from "/static/session.js";
import { known } from "/static/store.js";
import { hasKeys } from "/static/key.js";
import { Chart } from "/static/chart.js";
import { verified } from "/static/verify.js";

const AGAIN_MS = 2_000;
const KEEPS = { rounds: 200, blocks: 10 }, SHOWN = 6;
const PHASES = ["training", "voting", "closing", "closed"];
const TONES = { critical: "bad", warning: "warn", info: "" };
const place = (id) => at(`#${id}`);
const reasons = Object.fromEntries(Array.from(allAt("#reasons dt"), (term) => [term.textContent, term.nextElementSibling.textContent]));

let now = null, isHere = true, me;
const checks = {}; // this browser's verdicts, by height
const nameOf = (peer) => now.peers.find((one) => one.peer === peer)?.name || peer.slice(0, 8);
const Name = ({ of }) => html`<bdi>${nameOf(of)}</bdi>`;
const time = (ms) => new Date(ms).toLocaleTimeString();
const cell = (value) => html`<td class="number">${value}</td>`;

const nth = (round) => round + 1; // Rounds are shown from 1.

// Shows a large figure with a note. A figure without a value is hidden.
function tell(name, value, about, tone = "") {
  const shown = at(`[data-live=${name}]`), figure = shown.parentElement;
  figure.hidden = value === undefined;
  figure.className = `figure ${tone}`;
  render(String(value), shown);
  render(about, shown.nextElementSibling);
}

const Verdict = ({ is }) => is === undefined ? "–" : html`<span class=${is === "accept" ? "yes" : "no"}>${is === "accept" ? "✓" : "✗"} ${is}</span>`;

const VOUCHED = "The voter signed that it re-executed the update before its vote. The signature does not prove that it did.";
const UNSURE = "The voter was assigned to re-execute the update, but could not judge it.";
const Vouch = ({ is, ballot }) => is && html` <span class="chip vouch" title=${is === "unjudged" ? UNSURE : VOUCHED}>${is === "unjudged" ? "unsure" : is === ballot ? "re-executed" : `re-executed: ${is}`}</span>`;

function tellAll(job, rounds) {
  const { status, blocks, labels } = now, measured = rounds.findLast((one) => one.held_out_bits_per_byte !== null);
  tell("bits", measured?.held_out_bits_per_byte.toFixed(3), `after round ${nth(measured?.round)}`);
  tell("round", job && Math.min(nth(job.rounds_in_model), job.rounds), html`of ${job?.rounds}, job <bdi>${job?.name}</bdi>${job?.state === "running" ? "" : ` (${job?.state})`}`);
  tell("height", status.height, blocks.length ? `decided at ${time(blocks.at(-1).time_ms)}` : "no block decided yet");
  tell("labels", labels ?? undefined, "by annotators, in all projects");
  const { own_root, certified_root, signers, voters_count } = blocks.findLast((one) => one.own_root) ?? {}, isEqual = own_root === certified_root;
  if (!own_root) tell("roots", "–", "no certified state yet");
  else tell("roots", isEqual ? "equal" : "not equal", isEqual ? `${signers.length} of ${voters_count} voters signed ${own_root.slice(0, 8)}, as computed by this peer` : `${signers.length} of ${voters_count} voters signed ${certified_root.slice(0, 8)}, but this peer computed ${own_root.slice(0, 8)}`, isEqual ? "good" : "bad");
}

const alerts = () => now.alerts.map(({ cause, about, severity, text, since_ms }) => html`<p key=${cause + about} class="notice ${TONES[severity]}" data-severity=${severity}>
  <b>${severity}:</b> ${about && html`<${Name} of=${about} /> `}${text}, since ${time(since_ms)}</p>`);

// Renders the open round, and the votes on it. Until its first ballot arrives, the votes are those of the last closed round.
function round(job) {
  const ours = now.votes.filter((one) => one.job === job?.job), open = ours.find(({ height }) => height === null);
  const told = open && Object.keys(open.votes).length ? open : ours.findLast(({ height }) => height !== null);
  for (const phase of PHASES) place(phase).ariaCurrent = phase === (open?.phase ?? "closed") ? "step" : null;
  return ours.length > 0 && html`
    ${open && html`<p class="quiet small">Round ${nth(open.round)}: proposals from ${open.proposed.length} of ${open.trainers.length} trainers, votes from ${Object.keys(open.votes).length} of ${open.voters.length} voters (quorum ${open.quorum}).</p>`}
    ${told && html`<div class="scroll" tabindex="0"><table class="votes"><caption>Votes on each trainer's proposal in round ${nth(told.round)}</caption>
      <thead><tr><th scope="col">Voter</th>${told.proposed.map((who) => html`<th scope="col" key=${who}><${Name} of=${who} /></th>`)}</tr></thead>
      <tbody>${[...new Set([told.votes, told.vouches].flatMap(Object.keys))].map((voter) => html`<tr key=${voter}><th scope="row"><${Name} of=${voter} /></th>
        ${told.proposed.map((who) => html`<td key=${who} data-head=${nameOf(who)}><span><${Verdict} is=${told.votes[voter]?.[who]} /><${Vouch} is=${told.vouches[voter]?.[who]} ballot=${told.votes[voter]?.[who]} /></span></td>`)}</tr>`)}</tbody></table></div>
      ${Object.keys(told.vouches).length > 0 && html`<p class="quiet small legend"><span class="chip vouch">re-executed</span> ${VOUCHED} Voters without the mark rely on these signatures.</p>`}`}`;
}

const last = (rounds) => rounds.slice(-SHOWN).reverse().map(({ round, verdicts }) => html`<li key=${round}><b>${nth(round)}</b>
  ${Object.entries(verdicts).sort(([, one], [, other]) => (one !== "accept") - (other !== "accept")).map(([who, verdict]) => html` <span class="chip" key=${who}><${Name} of=${who} /> <${Verdict} is=${verdict} /></span>
    <span class="quiet small"> ${reasons[verdict]}</span>`)}</li>`);

const outcast = (peer, what) => html`<li key=${peer}><b class="name"><${Name} of=${peer} /></b> <span class="no">${what}</span></li>`;
const expelled = () => now.peers.filter(({ departed }) => departed.startsWith("expelled")).map(({ peer, departed }) => outcast(peer, departed));
const suspended = (job) => Object.entries(job?.suspended_until ?? {}).map(([peer, until]) => outcast(peer, `suspended until round ${nth(until)}`));

// Returns a trainer's numbers of updates: accepted, rejected, absent.
function counts(job, peer) {
  const { absent = 0, ...rejected } = job?.rejected[peer] ?? {};
  return [job?.accepted[peer] ?? 0, Object.values(rejected).reduce((sum, count) => sum + count, 0), absent].join(" / ");
}

const peers = (job) => now.peers.filter(({ departed }) => !departed).map(({ peer, me, voter, roles, is_linked, round_trip_ms }) => html`<tr key=${peer}>
  <th scope="row"><${Name} of=${peer} />${me && html` <span class="chip">this peer</span>`}</th>
  <td>${[voter && "voter", ...roles].filter(Boolean).join(", ")}${job?.reexecution_limits?.[peer] && html`<p class="quiet small">${job.reexecution_limits[peer]}</p>`}</td>
  ${cell(counts(job, peer))}
  ${cell(me ? "–" : is_linked ? round_trip_ms : html`<span class="no">not connected</span>`)}</tr>`);

function samples(job) {
  const [newest, before] = now.samples.filter((one) => one.job === job?.job).toReversed();
  return newest && [before, newest].map((one) => one && html`<figure key=${one.round}><figcaption class="what">${one === newest ? "Now" : "Before"}, ${one.round ? `after round ${one.round}` : "before round 1"}</figcaption>
    <blockquote tabindex="0" dir="auto">${one.text.replace(/[^\P{C}\n]|\ufffd/gu, "·")}</blockquote></figure>`);
}

const blocks = () => now.blocks.slice(-SHOWN).reverse().map(({ height, proposer, signers, voters_count, time_ms }) => html`<tr key=${height} data-block=${height}>
  ${cell(height)}<td><${Name} of=${proposer} /></td><td>${signers.length} of ${voters_count}</td><td>${time(time_ms)}</td>
  <td role="status">${checks[height] ?? html`<button class="quiet" disabled=${!hasKeys} aria-label="Verify in my browser: block ${height}" onClick=${() => check(height)}>Verify in my browser</button>`}</td></tr>`);

async function check(height) {
  try {
    const told = await verified(height, await call("GET", `/api/v1/blocks/${height}`), now.status.chain_id);
    checks[height] = html`<span class="yes" data-check="good">✓ verified: ${told}</span>`;
  } catch (problem) {
    checks[height] = html`<span class="no" data-check="bad">✗ ${problem.message}</span>`;
  }
  paint();
}

// Renders a panel. An empty panel is hidden.
function put(id, content) {
  const panel = place(id).closest("section"), isEmpty = !content || content.length === 0;
  render(content || null, place(id));
  if (panel) panel.hidden = isEmpty;
}

function paint() {
  place("offline").hidden = isHere;
  paintStatus({ network: now && { name: now.status.network }, isHere, who: me?.name });
  if (!now) return;
  const job = now.jobs.findLast((one) => one.state === "running") ?? now.jobs.findLast((one) => one.state !== "waiting");
  const rounds = now.rounds.filter((one) => one.job === job?.job), { network, name, state, voters, quorum, tolerated } = now.status;
  const points = rounds.filter((one) => one.held_out_bits_per_byte !== null).map((one) => [nth(one.round), one.held_out_bits_per_byte]);
  put("whole", html`<p class="quiet"><b><bdi>${network}</bdi></b> · ${voters === 1 ? "1 voter, which decides alone" : `${voters} voters · tolerates ${tolerated} faulty ${tolerated === 1 ? "voter" : "voters"} · quorum ${quorum}`} · seen by <bdi>${name}</bdi>, which is <b
    class=${state === "working" ? "yes" : "no"} data-live="state">${state}</b></p>`);
  put("alerts", alerts());
  tellAll(job, rounds);
  put("chart", points.length > 1 && html`<${Chart} points=${points} title="Held-out bits per byte of ${job.name}, after each round" />`);
  if (points.length > 1) put("points", points.map(([round, bits]) => html`<tr key=${round}><td>${round}</td>${cell(bits.toFixed(3))}</tr>`));
  put("round", round(job));
  put("rounds", last(rounds));
  const [gone, kept] = [expelled(), suspended(job)];
  render(gone, place("expelled"));
  render(kept, place("suspended"));
  put("nobody", gone.length + kept.length ? " " : "None so far.");
  put("peers", peers(job));
  put("samples", samples(job));
  put("blocks", blocks());
  place("watch").hidden = false;
  place("watch").classList.toggle("old", !isHere);
}

// Merges changed data. Rounds and blocks arrive one by one and are kept.
function take(changed) {
  for (const name of ["rounds", "blocks"]) {
    if (!changed[name] || !now) continue;
    const merged = new Map([...now[name], ...changed[name]].map((item) => [`${item.job} ${item.round ?? item.height}`, item]));
    changed[name] = [...merged.values()].slice(-KEEPS[name]);
  }
  now = { ...now, ...changed };
  paint();
}

function follow() {
  const stream = new EventSource("/api/v1/events?live=1");
  const told = (here) => { isHere = here; paint(); };
  stream.addEventListener("live", async ({ data }) => {
    take(JSON.parse(data));
    if (!me && (me = await known(now.status.chain_id))) paint();
  });
  stream.addEventListener("block", ({ data }) => now && take({ status: { ...now.status, height: JSON.parse(data).height } }));
  stream.onopen = () => told(true);
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MS); // refused, such as at the limit of viewers
    told(false);
  };
}

place("cannot").hidden = hasKeys;
follow();
