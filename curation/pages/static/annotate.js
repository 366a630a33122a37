// The page where people answer tasks.
import { differing } from "/static/diff.js";
import { figures, isAsLabel } from "/static/figures.js";
import { ASKS, answerOf, choices, inWords, isCollected, isComplete, leftOf } from "/static/kinds.js";
import { Leases } from "/static/leases.js";
import { at, html, paintStatus, patiently, pause, render, tell } from "/static/page.js";
import { Queue } from "/static/queue.js";
import { Ranking, moved, shownOrder } from "/static/ranking.js";
import { Shown, isolated, visible } from "/static/shown.js";
import { call, sessionOf } from "/static/session.js";
import { PERSON, Store } from "/static/store.js";
import { hex } from "/static/wire.js";

const REASONS = ["unclear", "harmful", "private", "broken"];
const SHOWN = 20; // answers in the list
const COUNTS_MS = 10_000; // between two reads of the projects' counts
const CHOSEN = "folkmoot project"; // the name in this tab's storage
const KEYS = { ArrowLeft: "←", ArrowRight: "→", "Control+Enter": "Ctrl ↵", Escape: "Esc" };

const state = {
  network: null, store: null, session: null, queue: null, leases: null,
  isHere: true, // whether the peer responded last time
  phase: "loading", // later `work`
  chosen: [], isSkipping: false, isHelping: false,
  isUnsaved: false, // The key has no backup, and its notice is not dismissed.
  guidelines: new Map(), // by path
  projects: [], // open projects with their counts
};

const current = () => state.leases?.tasks[0];
const isWide = matchMedia("(min-width: 60rem)").matches;

// Actions ---

let done = Promise.resolve();

// Runs actions one after the other, so that a lock is released before the next action needs it.
function inOrder(work) {
  done = done.then(work, work);
  return done;
}

async function give(changes) {
  const task = current();
  if (!task) return;
  const row = { assignment: task.assignment, task, salt: hex(crypto.getRandomValues(new Uint8Array(16))), ...changes };
  state.leases.tasks.shift();
  Object.assign(state, { chosen: [], isSkipping: false });
  tell();
  paint(); // The next task is shown before anything is stored or sent.
  await inOrder(async () => {
    try {
      await state.queue.add(row);
    } catch (error) {
      tell(error.name === "ConstraintError" ? "You have already answered this task in another tab." : `This browser could not store your answer: ${error.message}`, "bad");
    }
    await state.leases.release(task);
  });
  state.leases.ask();
}

function choose(value) {
  const task = current();
  if (!isCollected(task)) return give({ answer: [value] });
  state.chosen = state.chosen.includes(value) ? state.chosen.filter((other) => other !== value) : [...state.chosen, value];
  paint();
}

// Chooses a project. The task shown is released if it is of another project; given answers stay.
function chooseProject(project, isClosed) {
  const task = current();
  sessionStorage.setItem(CHOSEN, project);
  state.leases.choose(project, isClosed);
  if (current() !== task) Object.assign(state, { chosen: [], isSkipping: false });
  paint();
}

// Moves an item of a ranking to a position. All items are then placed in the order shown.
function move(item, to) {
  const order = shownOrder(current(), state.chosen), { activeElement } = document;
  if (to < 0 || to >= order.length || order[to] === item) return;
  state.chosen = moved(order, item, to);
  paint();
  tell(`Position ${to + 1} of ${order.length}: ${isolated(current().items[item].slice(0, 60))}`);
  activeElement.focus(); // The element was moved in the document and lost the focus.
}

const undo = () => inOrder(async () => {
  const row = await state.queue.undo();
  if (!row) return tell(state.queue.rows.length ? "Your last answer is already sent and cannot be undone." : "There is no answer to undo.", "warn");
  await state.leases.take(row.task, true);
  Object.assign(state, { chosen: row.answer && isCollected(row.task) ? row.answer : [], isSkipping: false });
  paint();
  tell("Answer undone. Choose again.");
});

// Returns all buttons of the page with their keys.
function actions() {
  const help = { key: "?", text: "Shortcuts", run: () => toggle("isHelping") };
  const undone = { key: "U", text: "Undo", run: undo };
  const task = current();
  if (state.phase !== "work") return [];
  if (!task) return [undone, help];
  if (state.isSkipping) {
    const reasons = REASONS.map((reason, index) => ({ key: String(index + 1), text: reason, isAnswer: true, run: () => give({ answer: null, reason }) }));
    return [...reasons, { key: "Escape", text: "Cancel", isAnswer: true, run: () => toggle("isSkipping") }];
  }
  const answers = choices(task).map(({ text, key, also, value }) => {
    const place = state.chosen.indexOf(value);
    return { key, also, text: visible(text), place: task.kind === "ranking" ? place : undefined, isAnswer: true, isPressed: isCollected(task) ? place >= 0 : undefined,
      run: () => choose(value) };
  });
  const send = { key: "Control+Enter", text: "Send", isPrimary: true, isDisabled: !isComplete(task, state.chosen),
    run: () => give({ answer: answerOf(task, state.chosen) }) };
  return [...answers, ...(isCollected(task) ? [send] : []), { key: "S", text: "Skip", run: () => toggle("isSkipping") }, undone, help];
}

function toggle(name) {
  state[name] = !state[name];
  paint();
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, [contenteditable]") || event.repeat || event.altKey) return;
  const isCombined = event.ctrlKey || event.metaKey;
  const key = isCombined ? `Control+${event.key}` : event.key;
  if (key === "Escape" && state.isHelping) return toggle("isHelping");
  const item = Number(event.target.closest("[data-item]")?.dataset.item), by = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (by && !Number.isNaN(item)) {
    event.preventDefault();
    return move(item, shownOrder(current(), state.chosen).indexOf(item) + by);
  }
  const action = actions().find((other) => [other.key, other.also].some((one) => one?.toLowerCase() === key.toLowerCase()));
  if (!action || action.isDisabled) return;
  event.preventDefault();
  action.run();
});

// Start ---

// Opens /join, with the invitation code if the address has one. That page leads back here.
const join = () => location.replace(`/join${location.hash}`);

// Starts the queue of answers and the leases. Answers wait in the browser while the peer is not responding.
async function begin(me) {
  state.store.by = hex(me.publicKey);
  state.session = sessionOf(state.network, me);
  state.queue = new Queue(state.store, state.session, (isHere) => {
    if (isHere !== undefined) noteHere(isHere);
    paint();
  }, (row, why) => tell(`Your answer to “${isolated(snippet(row))}” does not count: ${why}`, "bad"));
  state.leases = new Leases(state.session, state.queue, (problem, project) => {
    noteHere(problem?.status !== 0);
    if (problem?.status === 401) return join();
    if (problem?.status === 404 && project) return project === state.leases.project && chooseProject("", true);
    if (problem?.status) tell(problem.message, "bad");
    paint();
  });
  await state.session.begun();
  Object.assign(state, { phase: "work", isUnsaved: me.secret?.extractable });
  paint();
  await state.queue.start();
  state.leases.choose(sessionStorage.getItem(CHOSEN) ?? "");
  readProjects();
}

function noteHere(isHere) {
  if (isHere && !state.isHere) state.leases.ask(); // Leases may have expired meanwhile.
  state.isHere = isHere;
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && state.phase === "work") state.leases.ask(); });

// Rendering ---

const Key = ({ of }) => html`<kbd>${KEYS[of] ?? of.toUpperCase()}</kbd>`;

// The second click of a double click is ignored, so that it does not answer the next task.
const Button = ({ action }) => html`
  <button type="button" class=${action.isPrimary ? "primary" : action.isAnswer ? "answer" : "quiet"} disabled=${action.isDisabled}
    aria-keyshortcuts=${[action.key, action.also].filter(Boolean).join(" ") || null} aria-pressed=${action.isPressed?.toString() ?? null} onClick=${({ detail }) => (detail < 2 || action.isPressed !== undefined) && action.run()}>
    ${[action.key, action.also].map((key) => key && html`<${Key} of=${key} />`)}<span dir="auto">${action.text}</span>
    ${action.place !== undefined && html`<b class="place">${action.place + 1 || ""}</b>`}
  </button>`;

function Task({ task }) {
  if (!task) {
    return html`<section class="card task resting" aria-live="polite" data-state="waiting">
      <h1>${!state.isHere ? "No tasks while offline" : !state.leases.isEmpty ? "Looking for tasks …" : `No tasks for you ${state.leases.project && "in this project "}at the moment`}</h1>
      <p class="quiet">New tasks appear here automatically.</p>
    </section>`;
  }
  return html`<section class="card task" aria-live="polite" data-task=${task.task} data-assignment=${task.assignment} data-state="ready">
    <h1 class="asked">${state.isSkipping ? "Why do you skip this task?" : html`<bdi>${task.name}</bdi>: ${ASKS[task.kind](task)}`}</h1>
    <${Progress} project=${state.projects.find(({ project }) => project === task.project)} />
    ${task.text && html`<${Shown} text=${task.text} display=${task.display} />`}
    ${task.kind === "pair" && html`<${Pair} task=${task} />`}
    ${task.suggestion && html`<p class="quiet">A model suggests: <bdi>${inWords(task, task.suggestion)}</bdi></p>`}
  </section>`;
}

const Progress = ({ project }) => project && html`<p class="quiet small progress" data-progress>
  <progress value=${project.settled} max=${project.tasks} aria-label="Labeled tasks of this project"></progress> ${project.settled} of ${project.tasks} tasks labeled</p>`;

// The list loses the focus after a choice, so that keys answer tasks again.
const Choice = () => html`<label>Project <select value=${state.leases.project} onChange=${({ target }) => { target.blur(); chooseProject(target.value); }}>
  <option value="">all projects</option>
  ${state.projects.map(({ project, name, settled, tasks }) => html`<option key=${project} value=${project} dir="auto">${isolated(name)} (${settled} of ${tasks} labeled)</option>`)}
</select></label>`;

async function readProjects() {
  for (;; await pause(COUNTS_MS)) {
    if (document.hidden) continue;
    const counts = await call("GET", "/api/stats").catch(() => null);
    if (!counts) continue;
    state.projects = counts.projects;
    const isClosed = state.leases.project && counts.projects.every(({ project }) => project !== state.leases.project);
    if (isClosed) chooseProject("", true); else paint();
  }
}

function Pair({ task }) {
  const left = leftOf(task), sides = [task.items[left], task.items[1 - left]];
  const shown = task.display !== "plain" ? sides.map((text) => html`<${Shown} text=${text} display=${task.display} />`)
    : differing(...sides.map(visible)).map((parts) => html`<p class="text" dir="auto">${parts.map(([text, isDifferent]) => (isDifferent ? html`<mark>${text}</mark>` : text))}</p>`);
  return html`<div class="pair">${shown.map((text, side) => html`<article data-side=${"AB"[side]}><h2>${"AB"[side]}</h2>${text}</article>`)}</div>`;
}

const SAYS = {
  held: () => "not sent yet: press U to undo",
  sent: () => (state.isHere ? "sent, waiting for confirmation" : "waiting for the connection"),
  decided: (row) => (row.answer ? `recorded in block ${row.height}, label pending` : "skipped"),
  settled: (row) => (isAsLabel(row) ? "matches the label" : html`the label is <bdi>${inWords(row.task, row.label)}</bdi>`),
  lost: (row) => `not counted: ${row.problem}`,
};

const snippet = ({ task }) => visible((task.text || task.items.join(" / ")).slice(0, 90));

const Answer = ({ row }) => html`<li data-state=${row.state} data-answer=${row.assignment}>
  <p class="snippet line" dir="auto">${snippet(row)}</p>
  <p><b dir="auto">${row.answer ? inWords(row.task, row.answer) : `skipped: ${row.reason}`}</b> <span class=${`became ${row.label && !isAsLabel(row) ? "other" : ""}`}>${SAYS[row.state](row)}</span></p>
  ${row.suggestion && html`<p class="quiet small">A model suggested: <bdi>${inWords(row.task, row.suggestion)}</bdi></p>`}
</li>`;

function Guidelines({ task }) {
  const text = task?.guidelines && state.guidelines.get(task.guidelines);
  if (task?.guidelines && text === undefined) read(task.guidelines);
  const isKnown = state.queue.rows.some((row) => row.task.project === task?.project);
  return text && html`<details class="card guidelines" key=${task.project} open=${isWide || !isKnown}>
    <summary>Guidelines</summary><p class="text small" dir="auto">${visible(text)}</p></details>`;
}

async function read(path) {
  state.guidelines.set(path, ""); // read only once
  try {
    state.guidelines.set(path, await call("GET", path));
    paint();
  } catch {
    state.guidelines.delete(path); // The next task reads them again.
  }
}

function paintWork() {
  const task = current(), all = actions(), answers = all.filter(({ isAnswer }) => isAnswer), { rows } = state.queue;
  const isRanked = task?.kind === "ranking" && !state.isSkipping, { today, streak, agrees } = figures(rows, new Date());
  at("#unsaved").hidden = !state.isUnsaved;
  at("#help").hidden = !state.isHelping;
  render(state.projects.length > 1 && html`<${Choice} />`, at("#choice"));
  render(html`<${Task} task=${task} />`, at("#task"));
  at("#answers").className = `answers ${state.isSkipping ? "label" : task?.kind ?? ""}`;
  render(isRanked ? html`<${Ranking} key=${task.assignment} task=${task} placed=${state.chosen} actions=${answers} move=${move} Button=${Button} />`
    : answers.map((action) => html`<${Button} action=${action} />`), at("#answers"));
  render(all.filter(({ isAnswer }) => !isAnswer).map((action) => html`<${Button} action=${action} />`), at("#tools"));
  render(html`<${Guidelines} task=${task} />`, at("#guidelines"));
  for (const [id, value] of Object.entries({ today, streak, agrees: agrees ? `${agrees[0]}–${agrees[1]} %` : "–" })) at(`#${id}`).textContent = value;
  render(rows.slice(-SHOWN).reverse().map((row) => html`<${Answer} key=${row.assignment} row=${row} />`), at("#rows"));
  at("#rows + p").hidden = rows.length;
  at("#asking")?.remove();
  at("aside").hidden = false;
}

function paint() {
  if (state.phase === "work") paintWork();
  paintStatus({ ...state, who: state.session?.me.name });
}

async function start() {
  state.network = await patiently("/api/v1/network", () => {
    state.isHere = false;
    paint();
  });
  state.isHere = true;
  state.store = await Store.open(state.network.chain_id);
  const me = await state.store.me();
  if (!me) return join();
  new BroadcastChannel(PERSON).onmessage = () => location.reload();
  await begin(me).catch((problem) => (problem.status === 401 || problem.status === 403 ? join() : tell(problem.message, "bad")));
}

at("#unsaved button").onclick = () => toggle("isUnsaved");
paint();
start().catch((problem) => tell(problem.message, "bad"));
