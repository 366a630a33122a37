// The page of a project's author: tasks that need it first, with all votes side by side; decided by keys.
import { inWords } from "/static/kinds.js";
import { Table, act, ask, begin, desk, paint, tell } from "/static/operator.js";
import { html } from "/static/page.js";

const PROJECTS = "/api/v1/projects", PAGE = 25, FRESH = 100; // a longer list stays as it was until somebody searches again
const STATES = { "": "all", waiting: "waits for you", skipped: "skipped", disputed: "votes differ", begun: "begun", settled: "settled", fresh: "nobody had it", redacted: "redacted" };
const FORMATS = ["jsonl", "label-studio", "preferences"];
const NONE = { state: "", search: "", label: "", annotator: "" };

const state = {
  projects: [], project: null, wanted: NONE,
  tasks: null, next: null, listed: null, place: 0, // the task that is shown
  chosen: [],
  agreement: null, confusions: null, whose: "",
};

const current = () => state.tasks?.[state.place];
const isCollected = () => state.project.many || state.project.kind === "ranking";
const words = (answer) => inWords({ ...state.project, items: current()?.items ?? [], assignment: "0" }, answer);
const path = (tail) => `${PROJECTS}/${state.project.project}/${tail}`;

// Answers of this project, with their keys.
function choices() {
  const { kind, options } = state.project;
  const texts = { label: options, rating: options, pair: ["A is better", "B is better", "a tie", "both bad"], ranking: current()?.items }[kind];
  return texts.map((text, index) => ({ text, value: index + (kind === "rating"), key: index < 9 ? String(index + 1) : "" }));
}

// Reading ------------------------------------------------------------------------------------------------------------

async function read() {
  const { projects } = await ask("GET", PROJECTS);
  state.projects = projects.filter((one) => one.is_mine);
  const wanted = location.hash.slice(1); // the address names the project that is shown
  const found = state.projects.find((one) => one.project === wanted) ?? state.projects[0];
  const isNew = found?.project !== state.project?.project;
  const hasNews = !isNew && found && String(counts(found)) !== String(state.listed);
  state.project = found;
  if (isNew && found) await open();
  else if (hasNews && !state.chosen.length && state.tasks.length <= FRESH) await again();
}

const counts = ({ tasks, begun, review, settled }) => [tasks, begun, review, settled];

// The same task stays in sight, though those that need the author stand before it now.
async function again() {
  const shown = current()?.task;
  await list(state.tasks.length);
  state.place = Math.max(0, state.tasks.findIndex(({ task }) => task === shown));
}

async function open() {
  history.replaceState(null, "", `#${state.project.project}`);
  Object.assign(state, { tasks: null, agreement: null, confusions: null, whose: "" });
  await list();
  await agree();
}

async function agree() {
  [state.agreement, state.confusions] = await Promise.all([ask("GET", path("agreement")), ask("GET", path("confusions"))]);
}

async function list(atLeast = 1) {
  const { project } = state.project, found = [];
  const listed = counts(state.project);
  let next = "0:0";
  while (next && found.length < atLeast) next = await page(found, next);
  if (project === state.project.project) Object.assign(state, { tasks: found, next, place: 0, chosen: [], listed });
}

// A peer looks at some thousand tasks a call: it may have found none yet, and has more to look at.
async function page(found, after) {
  const { tasks, next } = await ask("GET", path(`review?${new URLSearchParams({ ...state.wanted, limit: PAGE, after })}`));
  found.push(...tasks);
  return next;
}

async function more() {
  const { tasks } = state, before = tasks.length;
  while (state.next && tasks === state.tasks && tasks.length === before) state.next = await page(tasks, state.next);
}

// What people do -----------------------------------------------------------------------------------------------------

function go(place) {
  if (place === state.tasks.length && state.next) return act(async () => { await more(); if (place < state.tasks.length) go(place); });
  if (!state.tasks[place]) return;
  Object.assign(state, { place, chosen: [] });
  paint();
  document.querySelector("[aria-current=true][data-place]")?.scrollIntoView({ block: "nearest" });
}

function choose(value) {
  if (current()?.state !== "waiting") return tell("This task does not wait for you.", "warn");
  const rest = state.chosen.filter((other) => other !== value);
  state.chosen = !isCollected() ? [value] : rest.length < state.chosen.length ? rest : [...rest, value];
  paint();
}

function decide() {
  const task = current(), { kind } = state.project;
  const answer = kind === "label" ? [...state.chosen].sort((a, b) => a - b) : state.chosen;
  if (task?.state !== "waiting" || (!answer.length && !state.project.many)) return;
  act(async () => {
    const { label } = await ask("POST", path(`tasks/${task.task}/decide`), { answer });
    Object.assign(task, { label, state: "settled", is_reviewed: true });
    state.chosen = [];
    const next = state.tasks.findIndex((other) => other.state === "waiting");
    if (next >= 0) state.place = next;
    agree().then(paint, () => {});
    return `Task ${task.number}: ${inWords({ ...state.project, items: task.items, assignment: "0" }, label)}.`;
  });
}

const KEYS = { j: () => go(state.place + 1), k: () => go(state.place - 1), "/": () => document.querySelector("[name=search]").focus(), Enter: decide };

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return document.activeElement.blur();
  if (desk.phase !== "work" || !state.project || event.target.closest("input, textarea, select, a, summary") || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Enter" && event.target.closest("button")) return; // the button's own
  const choice = current() && choices().find(({ key }) => key === event.key);
  const run = choice ? () => choose(choice.value) : KEYS[event.key];
  if (!run) return;
  event.preventDefault();
  run();
});

function filter(event) {
  event.preventDefault();
  state.wanted = Object.fromEntries(new FormData(event.target.form ?? event.target));
  act(list);
}

// What people see ----------------------------------------------------------------------------------------------------

const Filters = () => html`<form class="card filters" onSubmit=${filter} role="search" aria-label="Search">
  <label>Project<select onChange=${(event) => { state.project = state.projects.find((one) => one.project === event.target.value); act(open); }}>
    ${state.projects.map((one) => html`<option value=${one.project} selected=${one === state.project}>${one.name} (${one.state})</option>`)}</select></label>
  <label>State<select name="state" onChange=${filter}>${Object.entries(STATES).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>
  ${state.project.kind !== "ranking" && html`<label>Label<select name="label" onChange=${filter}><option value="">any</option>
    ${choices().map(({ text, value }) => html`<option value=${value}>${text}</option>`)}</select></label>`}
  <label>Annotator<input name="annotator" autocomplete="off" placeholder="name or key" /></label>
  <label>Text <kbd>/</kbd><input name="search" type="search" autocomplete="off" /></label>
  <button>Search</button></form>`;

const snippet = ({ text, items }) => (text || items.join(" / ") || "(no text here)").slice(0, 80);

const List = () => html`<nav class="card list" aria-label="Tasks"><h2>Tasks</h2>
  ${state.tasks.length ? html`<ol>${state.tasks.map((task, place) => html`<li key=${task.task}>
      <button class="quiet" data-place=${place} data-task=${task.task} data-need=${task.state} aria-current=${place === state.place ? "true" : null} onClick=${() => go(place)}>
        <span>${snippet(task)}</span><small>${STATES[task.state]}</small></button></li>`)}</ol>`
    : html`<p class="quiet">${state.project.tasks ? "No such task." : "This project has no tasks yet."}</p>`}
  ${state.next && html`<button onClick=${() => act(more)}>More</button>`}</nav>`;

function Task({ task }) {
  const rows = task.votes.map((vote) => ({ key: vote.annotator, "data-vote": vote.annotator, cells: [html`<b>${vote.name}</b> <code>${vote.annotator.slice(0, 8)}</code>`,
    vote.answer ? html`<b class=${task.label && String(task.label) !== String(vote.answer) ? "other" : ""}>${words(vote.answer)}</b>` : html`<span class="quiet">${vote.state}</span>`] }));
  if (task.suggestion) rows.unshift({ key: "model", "data-vote": "model", cells: ["A model suggests", words(task.suggestion)] });
  return html`<section class="card task" aria-live="polite" data-current=${task.task} data-state=${task.state}>
    <p class="asked">Task ${task.number}: ${STATES[task.state]}${task.skips ? `, skipped ${task.skips} ×` : ""}</p>
    ${task.text && html`<p class="text">${task.text}</p>`}
    ${task.text === null && html`<p class="quiet">${task.state === "redacted" ? "Its text is taken out." : "Its text is not here yet."}</p>`}
    ${task.items.length > 0 && html`<ol class="items" type=${state.project.kind === "pair" ? "A" : "1"}>${task.items.map((item) => html`<li class="text small">${item}</li>`)}</ol>`}
    <${Table} isNarrow caption="Votes" heads=${["Annotator", "Answer"]} rows=${rows} empty="No votes yet." />
    ${task.label && html`<p>The label is <b data-label>${words(task.label)}</b>${task.is_reviewed ? ", as the author said" : ""}, since height ${task.height}.</p>`}
    ${task.state === "waiting" && html`<div class="answers" role="group" aria-label="Your decision">
      ${choices().map(({ text, key, value }) => html`<button class="answer" aria-keyshortcuts=${key || null} aria-pressed=${String(state.chosen.includes(value))} onClick=${() => choose(value)}>
        ${key && html`<kbd>${key}</kbd>`} <span>${text}</span></button>`)}
      <button class="primary" aria-keyshortcuts="Enter" disabled=${!state.chosen.length && !state.project.many} onClick=${decide}>Decide <kbd>Enter</kbd></button></div>
      <p class="quiet small">The network decides it at once, and nobody can take it back.</p>`}
  </section>`;
}

const decimal = (fraction) => {
  const [over, under = 1] = (fraction ?? "").split("/").map(Number);
  return fraction ? (over / under).toFixed(3) : "–";
};

const Confusion = ({ counts, values }) => html`<div class="scroll" tabindex="0" role="region" aria-label="Answers against labels"><table class="confusion">
  <thead><tr><td></td>${values.map((value) => html`<th scope="col">${value}</th>`)}</tr></thead>
  <tbody>${counts.map((row, label) => html`<tr><th scope="row">${values[label]}</th>${row.map((count, said) => html`<td class=${said === label ? "right" : count ? "wrong" : ""}>${count}</td>`)}</tr>`)}</tbody></table></div>`;

function Agreement() {
  const { agreement, confusions } = state;
  if (!agreement || !confusions) return null;
  const names = Object.fromEntries(confusions.annotators.map(({ annotator, name }) => [annotator, name]));
  const one = confusions.annotators.find(({ annotator }) => annotator === state.whose);
  return html`<section class="card" aria-label="Agreement"><h2>Agreement</h2>
    <p>Krippendorff's alpha of settled tasks: <b data-live="alpha">${decimal(agreement.alpha)}</b>. 1 is full agreement, 0 that of chance.</p>
    <${Table} caption="Cohen's kappa of two annotators" heads=${["Annotator", "And", "Common answers", "Kappa"]} empty="No two annotators have ten common answers yet."
      rows=${agreement.pairs.map((pair) => ({ key: pair.first + pair.second, cells: [names[pair.first] ?? pair.first.slice(0, 8), names[pair.second] ?? pair.second.slice(0, 8), pair.common, decimal(pair.kappa)] }))} />
    ${confusions.annotators.length > 0 && html`<h3>Answers against labels</h3><p class="quiet small">Rows are labels, columns what was answered.</p>
      <label class="filters">Of<select onChange=${(event) => { state.whose = event.target.value; paint(); }}><option value="">all annotators</option>
        ${confusions.annotators.map(({ annotator, name, count }) => html`<option value=${annotator}>${name} (${count})</option>`)}</select></label>
      <${Confusion} counts=${(one ?? confusions).counts} values=${confusions.values} />`}</section>`;
}

const Export = () => html`<section class="card" aria-label="Export"><h2>Export</h2><p class="tools">
  ${FORMATS.filter((format) => format !== "preferences" || state.project.kind === "pair").map((format) => html`
    <a class="button" download=${`${state.project.name}.${format === "label-studio" ? "json" : "jsonl"}`} href=${path(`export?format=${format}`)}>${format}</a>`)}</p>
  <p class="quiet small">Settled tasks with their votes; the same file at each peer.</p></section>`;

function Work() {
  if (!state.project) return html`<h1>Review</h1><p>This peer has made no project yet. <a href="/admin#projects">Make one.</a></p>`;
  return html`<h1>Review ${state.project.name}</h1><${Filters} />
    ${!state.tasks ? html`<p class="quiet">Asking the peer …</p>` : html`<div class="desk"><div>
      ${current() && html`<${Task} key=${current().task} task=${current()} />`}
      <p class="quiet small">Keys: <kbd>1</kbd> to <kbd>9</kbd> choose, <kbd>Enter</kbd> decides, <kbd>J</kbd> and <kbd>K</kbd> go on and back, <kbd>/</kbd> searches, <kbd>Esc</kbd> leaves a field.</p>
      </div><${List} /></div>`}
    <${Agreement} /><${Export} />`;
}

begin("review", Work, read);
