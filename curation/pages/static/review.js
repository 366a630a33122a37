// The page of a project's author. Tasks that need a decision come first, each with all its answers. Keys decide.
import { answerOf, choices as choicesOf, inWords, isCollected, isComplete } from "/static/kinds.js";
import { act, ask, begin, once, paint } from "/static/operator.js";
import { allAt, at, fill, forms, html, render, tell } from "/static/page.js";
import { Shown, isolated, visible } from "/static/shown.js";

const PROJECTS = "/api/v1/projects", PAGE = 25, FRESH = 100; // a longer list is not refreshed until the next search

const state = {
  projects: [], project: null, wanted: {},
  tasks: null, next: null, listed: "", place: 0, // index of the task shown
  chosen: [],
  agreement: null, confusions: null, whose: "",
};

const current = () => state.tasks?.[state.place];
const asked = (task = current()) => ({ ...state.project, items: task?.items ?? [], assignment: "0" }); // a task as on an annotator's page
const words = (answer, task) => inWords(asked(task), answer);
const path = (tail) => `${PROJECTS}/${state.project.project}/${tail}`;
const inState = (name) => at(`option[value="${name}"]`).text;

const choices = () => choicesOf(asked()).map((choice) => ({ ...choice, key: choice.also ?? choice.key })); // A pair has digits as keys, too.
const isReady = () => isComplete(asked(), state.chosen) && (state.project.many || state.chosen.length > 0);

// Data ---

async function read() {
  const { projects } = await ask("GET", PROJECTS), wanted = location.hash.slice(1); // The address names the project shown.
  state.projects = projects.filter((one) => one.is_mine);
  const found = state.projects.find((one) => one.project === wanted) ?? state.projects[0], isNew = found?.project !== state.project?.project;
  state.project = found;
  if (!found) return;
  if (isNew || !state.tasks) await open();
  else if (counts() !== state.listed && !state.chosen.length && state.tasks.length <= FRESH) await list(state.tasks.length || 1, current()?.task);
  if (state.agreement?.project !== found.project) await agree();
}

const counts = () => ["tasks", "begun", "review", "settled"].map((name) => state.project[name]).join();

async function open() {
  history.replaceState(null, "", `#${state.project.project}`);
  Object.assign(state, { tasks: null, whose: "", wanted: {} });
  at("#filters").reset();
  await list();
}

async function agree() {
  [state.agreement, state.confusions] = await Promise.all([ask("GET", path("agreement")), ask("GET", path("confusions"))]);
}

// Reads the list again, at the task `shown`. The new list is dropped if an option was chosen meanwhile.
async function list(atLeast = 1, shown) {
  const { wanted } = state, tasks = [], listed = counts();
  let next = "0:0";
  while (next && tasks.length < atLeast) next = await page(tasks, next);
  if (wanted !== state.wanted || (shown && (state.chosen.length || shown !== current()?.task))) return;
  Object.assign(state, { tasks, next, listed, place: Math.max(0, tasks.findIndex(({ task }) => task === shown)), chosen: [] });
}

// Reads a page of tasks. The peer scans a bounded number of tasks in a call, so an empty page may have a successor.
async function page(found, after) {
  const { tasks, next } = await ask("GET", path(`review?${new URLSearchParams({ ...state.wanted, limit: PAGE, after })}`));
  found.push(...tasks);
  return next;
}

async function more() {
  const { tasks } = state, before = tasks.length;
  while (state.next && tasks === state.tasks && tasks.length === before) state.next = await page(tasks, state.next);
}

// Actions ---

function go(place) {
  if (place === state.tasks.length && state.next) return act(async () => { await more(); if (place < state.tasks.length) go(place); });
  if (!state.tasks[place]) return;
  Object.assign(state, { place, chosen: [] });
  paint();
  at(".list [aria-current]").scrollIntoView({ block: "nearest" });
}

function choose(value) {
  if (current()?.state !== "waiting") return tell("This task does not need your decision.", "warn");
  const rest = state.chosen.filter((other) => other !== value);
  state.chosen = !isCollected(asked()) ? [value] : rest.length < state.chosen.length ? rest : [...rest, value];
  paint();
}

function decide() {
  const task = current();
  if (task?.state !== "waiting" || !isReady()) return;
  once(async () => {
    const { label } = await ask("POST", path(`tasks/${task.task}/decide`), { answer: answerOf(asked(), state.chosen) });
    Object.assign(task, { label, state: "decided", is_reviewed: true });
    const next = state.tasks.findIndex((other) => other.state === "waiting");
    if (task === current()) Object.assign(state, { chosen: [], place: next < 0 ? state.place : next });
    agree().then(paint, () => {});
    return `Task ${task.number} decided: ${isolated(words(label, task))}.`;
  });
}

const KEYS = { j: () => go(state.place + 1), k: () => go(state.place - 1), "/": () => at("[name=search]").focus(), Enter: decide };

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return document.activeElement.blur();
  if (!state.tasks || event.target.closest("input, select, a, dialog") || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Enter" && (event.repeat || event.target.closest("button"))) return; // a held key, or Enter on a button
  const choice = choices().find(({ key }) => key === event.key);
  const run = choice ? () => choose(choice.value) : KEYS[event.key];
  if (!run) return;
  event.preventDefault();
  run();
});

forms.filters = ({ project, ...wanted }) => {
  if (project !== state.project.project) location.hash = project;
  else act(() => { state.wanted = wanted; return list(); });
};
at("#filters").addEventListener("change", (event) => { if (event.target.matches("select")) event.currentTarget.requestSubmit(); });

// Rendering ---

const snippet = ({ text, items }) => visible((text || items.join(" / ") || "(text not available)").slice(0, 80));

const List = () => html`<nav class="card list" aria-label="Tasks"><h2>Tasks</h2>
  ${state.tasks.length ? html`<ol class="plain">${state.tasks.map((task, place) => html`<li key=${task.task}>
      <button class="quiet" data-need=${task.state} aria-current=${place === state.place ? "true" : null} onClick=${() => go(place)}>
        <span class="line" dir="auto">${snippet(task)}</span><small>${inState(task.state)}</small></button></li>`)}</ol>`
    : html`<p class="quiet">${state.project.tasks ? "No matching tasks." : "This project has no tasks yet."}</p>`}
  ${state.next && html`<button onClick=${() => act(more)}>Show more</button>`}</nav>`;

function Task({ task }) {
  return html`<section class="card task" aria-live="polite" data-current=${task.task} data-state=${task.state}>
    <p class="asked">Task ${task.number}: ${inState(task.state)}${task.skips ? `, skipped ${task.skips === 1 ? "once" : `${task.skips} times`}` : ""}</p>
    ${task.text === null ? html`<p class="quiet">${task.state === "redacted" ? "The text of this task was redacted." : "This peer does not have the text yet."}</p>` : html`<${Shown} text=${task.text} display=${state.project.display} />`}
    ${task.items.length > 0 && html`<ol type=${state.project.kind === "pair" ? "A" : "1"}>${task.items.map((item) => html`<li class="small"><${Shown} text=${item} display=${state.project.display} isSmall /></li>`)}</ol>`}
    <table><caption>Answers</caption><tbody>
      ${task.suggestion && html`<tr><td>Suggestion of a model</td><td><bdi>${words(task.suggestion)}</bdi></td></tr>`}
      ${task.votes.map(({ annotator, name, answer, state: became, reason }) => html`<tr key=${annotator}><td><b><bdi>${name}</bdi></b> <code>${annotator.slice(0, 8)}</code></td>
        <td class=${task.label && answer && String(task.label) !== String(answer) ? "other" : ""}><bdi>${answer ? words(answer) : inState(became)}</bdi>${reason && html`: <bdi data-reason>${visible(reason)}</bdi>`}</td></tr>`)}</tbody></table>
    ${task.label && html`<p>Label: <b data-label dir="auto">${words(task.label)}</b>${task.is_reviewed ? " (decided by the author)" : ""}</p>`}
    ${task.state === "waiting" && html`<div class="answers" role="group" aria-label="Your decision">
      ${choices().map(({ text, key, value }) => html`<button class="answer" aria-keyshortcuts=${key || null} aria-pressed=${String(state.chosen.includes(value))} onClick=${() => choose(value)}>
        ${key && html`<kbd>${key.toUpperCase()}</kbd>`} <span dir="auto">${text}</span></button>`)}
      <button class="primary" aria-keyshortcuts="Enter" disabled=${!isReady()} onClick=${decide}>Decide <kbd>Enter</kbd></button></div>`}
  </section>`;
}

const decimal = (fraction) => {
  const [over, under = 1] = (fraction ?? "").split("/");
  return fraction ? (over / under).toFixed(3) : "–";
};

const Confusion = ({ counts, values }) => html`<table class="confusion">
  <thead><tr><td></td>${values.map((value) => html`<th scope="col" dir="auto">${value}</th>`)}</tr></thead>
  <tbody>${counts.map((row, label) => html`<tr><th scope="row" dir="auto">${values[label]}</th>${row.map((count, said) => html`<td class=${said === label ? "right" : count ? "wrong" : ""}>${count}</td>`)}</tr>`)}</tbody></table>`;

function drawAgreement({ alpha, pairs }, confusions) {
  const { annotators, values } = confusions;
  const named = (key) => annotators.find(({ annotator }) => annotator === key)?.name ?? key.slice(0, 8);
  at("#alpha").textContent = decimal(alpha);
  fill("kappas", pairs.map(({ first, second, common, kappa }) => [first + second, named(first), named(second), common, decimal(kappa)]));
  options("#whose", [["", "all annotators"], ...annotators.map(({ annotator, name, count }) => [annotator, `${name} (${count})`])], state.whose);
  const { counts } = annotators.find(({ annotator }) => annotator === state.whose) ?? confusions;
  render(html`<${Confusion} counts=${counts} values=${values} />`, at("#confusion"));
}

const options = (selector, of, chosen) => render(of.map(([value, text]) => html`<option value=${value} dir="auto" selected=${String(value) === chosen}>${text}</option>`), at(selector));

function draw() {
  const { project, projects, wanted, agreement, confusions } = state;
  at("#none").hidden = !!project;
  for (const part of allAt("#filters, section.card[aria-label]")) part.hidden = !project;
  if (!project) return;
  const { name, kind } = project;
  render(html`Review <bdi>${name}</bdi>`, at("#work h1"));
  options("[name=project]", projects.map((one) => [one.project, `${one.name} (${one.state})`]), project.project);
  at("[name=label]").parentElement.hidden = kind === "ranking";
  options("[name=label]", [["", "any"], ...choices().map(({ value, text }) => [value, text])], wanted.label ?? "");
  render(!state.tasks ? html`<p class="quiet">Loading …</p>`
    : html`<div class="desk"><div>${current() && html`<${Task} key=${current().task} task=${current()} />`}</div><${List} /></div>`, at("#shown"));
  const isOurs = agreement?.project === project.project;
  at("[aria-label=Agreement]").hidden = !isOurs;
  if (isOurs) drawAgreement(agreement, confusions);
  for (const link of allAt("[data-format]")) {
    const { format, end } = link.dataset;
    Object.assign(link, { href: path(`export?format=${format}`), download: `${name}${format === "preferences" ? ".preferences" : ""}.${end}`, hidden: format === "preferences" && kind !== "pair" });
  }
}

at("#whose").onchange = ({ target }) => { state.whose = target.value; paint(); };
begin(read, draw);
