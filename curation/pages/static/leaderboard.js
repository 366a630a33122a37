// The page that lists annotators by points.
import { at, fill, html, paintStatus, patiently, pause, tell } from "/static/page.js";
import { known } from "/static/store.js";
import { hex } from "/static/wire.js";

const ROWS = 100;
const AGAIN_MS = 5_000; // Points change when a project closes, answers before.

const state = { network: null, isHere: true };

function paint(isHere, problem = "") {
  state.isHere = isHere;
  tell(problem, problem && "bad");
  paintStatus({ ...state, who: state.me?.name });
}

const away = () => paint(false);

function show({ rows, height }) {
  const me = state.me && hex(state.me.publicKey);
  at("#asking")?.remove();
  at("[data-live=height]").textContent = height;
  fill("board", rows.map(({ rank, annotator, name, accepted, points }) => [annotator, rank,
    html`<b><bdi>${name}</bdi></b> <code title="First digits of the key, which differ even if names are equal">${annotator.slice(0, 8)}</code>${annotator === me && html` <span class="chip">you</span>`}`, accepted, points]));
}

async function follow() {
  for (;; await pause(AGAIN_MS)) {
    if (document.hidden) continue;
    try {
      state.network ??= await patiently("/api/v1/network", away);
      state.me ??= await known(state.network.chain_id);
      show(await patiently(`/api/leaderboard?limit=${ROWS}`, away));
      paint(true);
    } catch (problem) {
      paint(true, problem.message);
    }
  }
}

paint(true);
follow();
