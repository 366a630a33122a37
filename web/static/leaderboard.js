// The page that lists annotators by points.
import { html, paintStatus, patiently, pause, render } from "/static/page.js";

const ROWS = 100;
const AGAIN_MS = 5_000; // points change at the close of a project, answers before

const state = { network: null, board: null, isHere: true, problem: "" };

const Board = ({ board: { rows, height } }) => html`
  <table>
    <caption>Decided by all peers, at height <b data-live="height">${height}</b></caption>
    <thead><tr><th scope="col" class="number">Rank</th><th scope="col">Annotator</th><th scope="col" class="number">Accepted answers</th>
      <th scope="col" class="number">Points</th></tr></thead>
    <tbody>${rows.map(({ rank, annotator, name, accepted, points }) => html`<tr key=${annotator} data-annotator=${annotator}>
      <td class="number">${rank}</td><td><b>${name}</b> <code title="The key, which tells two of one name apart">${annotator.slice(0, 8)}</code></td>
      <td class="number">${accepted}</td><td class="number">${points}</td></tr>`)}</tbody>
  </table>`;

const Page = () => html`
  <section class="card board">
    <h1>Leaderboard</h1>
    <p class="quiet">Points are paid when a project closes. Who agrees with what the others say, more often than by chance, is paid more for an answer.</p>
    ${state.problem && html`<p class="notice bad" role="alert">${state.problem}</p>`}
    ${!state.isHere && html`<p class="notice warn" role="status">This peer does not answer at the moment.</p>`}
    ${!state.board ? html`<p class="quiet">Asking the peer …</p>`
      : state.board.rows.length ? html`<${Board} board=${state.board} />`
      : html`<p>Nobody has joined yet. <a href="/annotate">Be the first.</a></p>`}
  </section>`;

function paint() {
  render(html`<${Page} />`, document.getElementById("leaderboard"));
  paintStatus(state);
}

function away() {
  state.isHere = false;
  paint();
}

async function follow() {
  for (;; await pause(AGAIN_MS)) {
    if (document.hidden) continue;
    try {
      state.network ??= await patiently("/api/v1/network", away);
      state.board = await patiently(`/api/leaderboard?limit=${ROWS}`, away);
      Object.assign(state, { isHere: true, problem: "" });
    } catch (problem) {
      state.problem = problem.message;
    }
    paint();
  }
}

paint();
follow();
