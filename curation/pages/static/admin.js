// The page of operators: health, alerts, projects, people, jobs, and the log. Its forms and tables are in the template.
import { act, ask, begin, once, paint, signOut, sure } from "/static/operator.js";
import { allAt, at, fill, forms, html, render } from "/static/page.js";
import { Shown, isolated, visible } from "/static/shown.js";

const ADMIN = "/api/v1/admin", PROJECTS = "/api/v1/projects", PAGE = 50;
const state = {
  tab: "health", alerts: [], health: null, projects: [], people: [], count: 0, jobs: [], log: [], search: "", shown: PAGE,
  project: null, // project of the open form
  checked: null, // the peer's preview of the form's file
};

const READS = {
  health: async () => { state.health = await ask("GET", `${ADMIN}/health`); },
  projects: async () => Object.assign(state, await ask("GET", PROJECTS)),
  people: async () => {
    const people = [];
    for (let offset = 0; offset < state.shown; offset += PAGE) {
      const found = await ask("GET", `${ADMIN}/people?${new URLSearchParams({ search: state.search, offset, limit: PAGE })}`);
      people.push(...found.people);
      state.count = found.count;
    }
    state.people = people;
  },
  jobs: async () => Object.assign(state, await ask("GET", `${ADMIN}/jobs`)),
  log: async () => { state.log = (await ask("GET", `${ADMIN}/log?limit=${Math.min(state.shown, 200)}`)).entries; },
};

async function read() {
  const tab = location.hash.slice(1);
  if (tab in READS && tab !== state.tab) {
    Object.assign(state, { tab, shown: PAGE });
    shut();
  }
  Object.assign(state, await ask("GET", `${ADMIN}/alerts`));
  await READS[state.tab]();
}

const post = (path, body, text) => once(async () => {
  const { said } = await ask("POST", path, body);
  shut();
  return said ?? text;
});
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const bytes = (count) => (count < 2 ** 30 ? `${Math.ceil(count / 2 ** 20)} MiB` : `${(count / 2 ** 30).toFixed(1)} GiB`);
const duration = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);
const when = (ms) => new Date(ms).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
const Quiet = ({ does, run }) => html`<button class="quiet" onClick=${run}>${does}</button>`;
const Named = ({ name, id }) => html`<b><bdi>${name}</bdi></b> <code>${id.slice(0, 8)}</code>`;

// Forms ---

function shut() {
  state.checked = null;
  for (const form of allAt(".step")) form.hidden = true;
}

function open(id, project) {
  shut();
  state.project = project;
  const form = at(`#${id}`);
  form.hidden = false;
  if (project) form.querySelector("h2 bdi").textContent = project.name;
  form.querySelector("input").focus();
}

document.addEventListener("reset", (event) => { if (event.target.matches(".step")) { shut(); paint(); } });
document.addEventListener("input", (event) => { if (state.checked && event.target.closest(".step")) { state.checked = null; paint(); } });

const format = (name) => (/\.(csv|tsv|tab)$/i.test(name) ? "csv" : /\.json$/i.test(name) ? "json" : "jsonl");
const sent = ({ name }, gold_from) => new URLSearchParams({ name, format: format(name), gold_from });
const path = (tail) => `${PROJECTS}/${state.project.project}/${tail}`;

// Requests a preview of a file, without an import.
const seen = (query, file, gold_from, more) => act(async () => {
  state.checked = { ...await ask("POST", `${query}&${sent(file, gold_from)}`, file), file, gold_from, ...more };
});

forms.make = ({ file, gold_from, options, many, suggests_first, votes, price, ...rest }) => {
  const asked = { ...rest, options: /label|rating/.test(rest.kind) ? lines(options) : [], many: rest.kind === "label" && !!many,
    suggests_first: !!suggests_first, votes: Number(votes), price: Number(price) };
  const query = new URLSearchParams({ kind: asked.kind, options: asked.options.join("\n"), many: Number(asked.many) });
  seen(`${PROJECTS}/check?${query}`, file, gold_from, { asked });
};
forms.import = ({ file, gold_from }) => seen(path("tasks?check=1"), file, gold_from, { project: state.project });

// Creates the project if needed, and imports its tasks. A retry after a failed import does not create the project again.
const send = (checked) => once(async () => {
  const { asked, items, file, gold_from, count, already } = checked, { project } = checked.project ??= await ask("POST", PROJECTS, { ...asked, items });
  const { tasks } = await ask("POST", `${PROJECTS}/${project}/tasks?again=${Number(already === count)}&${sent(file, gold_from)}`, file);
  if (state.checked === checked) shut();
  return `The project has ${counted(tasks, "task")}${count > tasks ? "; the import continues" : ""}.`;
});

forms.redact = ({ task, reason }) => sure("redacts", { task }, () => post(path("redact"), { task: Number(task), reason }));
forms.train = ({ rounds, overrides, ...rest }) => post(`${ADMIN}/jobs`,
  { ...rest, rounds: Number(rounds), overrides: Object.fromEntries(lines(overrides).map((line) => /^(.*?) *(?:= *|$)(.*)/.exec(line).slice(1))) }, "Job submitted.");
forms.search = ({ search }) => { Object.assign(state, { search, shown: PAGE }); act(read); };

function Checked({ checked }) {
  const { problems, preview, count, asked, notes = [], already } = checked, { display } = asked ?? checked.project;
  if (problems.length) {
    return html`<div class="notice bad" role="alert"><p>Nothing was imported. Correct these lines, then check the file again:</p>
      <ul data-problems>${problems.map((problem) => html`<li dir="auto">${visible(problem)}</li>`)}</ul></div>`;
  }
  return html`<section class="preview" data-preview aria-label="Preview"><h3>${counted(count, "task")}. The first ones, as annotators see them:</h3>
    ${notes.length > 0 && html`<ul class="notice" data-notes>${notes.map((note) => html`<li dir="auto">${visible(note)}</li>`)}</ul>`}
    ${asked?.guidelines && html`<details><summary>Guidelines</summary><p class="text small" dir="auto">${visible(asked.guidelines)}</p></details>`}
    <ol>${preview.map(({ text, items }) => html`<li><${Shown} text=${text} display=${display} isSmall />
      ${items.length > 0 && html`<ul>${items.map((item) => html`<li><${Shown} text=${item} display=${display} isSmall /></li>`)}</ul>`}</li>`)}</ol>
    ${asked && html`<p>${asked.options.map((option, index) => html`<span class="option"><kbd>${index + 1}</kbd> <bdi>${visible(option)}</bdi></span> `)}</p>`}
    <button class="primary" type="button" onClick=${() => send(checked)}>${asked ? "Create project" : already === count ? "Import again" : "Import"}</button></section>`;
}

// Sections ---

function health() {
  const it = state.health, { disk, queues, versions } = it;
  const facts = [
    it.problem || it.state, it.height, it.heights_behind ?? "unknown: no peer is connected", it.links, it.decided_seconds_ago === null ? "none yet" : `${duration(it.decided_seconds_ago)} ago`, duration(it.uptime_seconds),
    bytes(it.memory_bytes), bytes(disk.used_bytes), `${bytes(disk.free_bytes)} of ${bytes(disk.total_bytes)}`, queues.statements_waiting, queues.transactions_pending,
    `${versions.program}, wire ${versions.wire}`, versions.modules.map(({ module, active_version }) => `${module} ${active_version}`).join(", "),
  ]; // in the order of the template
  allAt("#facts dd").forEach((fact, place) => { fact.textContent = facts[place]; });
  render(state.alerts.map(({ severity, cause, about, text, since_ms }) => html`
    <li key=${cause + about} data-alert=${cause} class=${severity}><b>${severity}</b> <bdi>${text}</bdi> <span class="quiet small">since ${when(since_ms)}</span></li>`), at("#alerts"));
  at("#alerts + p").hidden = state.alerts.length;
}

const MOVED = { open: "open", pause: "paused", close: "closed" };

function Actions({ project }) {
  const { name, project: id } = project, next = project.state === "open" ? "pause" : "open";
  const move = (call) => post(`${PROJECTS}/${id}/${call}`, {}, `Project ${isolated(name)} is ${MOVED[call]}.`);
  if (!project.is_mine) return "by another member";
  return html`<div class="tools"><a href=${`/review#${id}`}>Review</a>
    ${project.state !== "closed" && html`<${Quiet} does=${next === "open" ? "Open" : "Pause"} run=${() => move(next)} /><${Quiet} does="Import" run=${() => open("import", project)} />
      <${Quiet} does="Close" run=${() => sure("closes", { name }, () => move("close"))} />`}
    <${Quiet} does="Redact" run=${() => open("redact", project)} /></div>`;
}

function Refusal({ person: { annotator, name, is_refused } }) {
  const change = (call, text) => post(`${ADMIN}/people/${annotator}/${call}`, {}, `${isolated(name)} gets ${text} from this peer.`);
  return is_refused ? html`<${Quiet} does="Allow" run=${() => change("allow", "tasks")} />`
    : html`<${Quiet} does="Refuse" run=${() => sure("refuses", { name }, () => change("refuse", "no more tasks"))} />`;
}

const cancel = ({ name, job }) => sure("cancels", { name }, () => post(`${ADMIN}/jobs/${job}/cancel`, {}));

const DRAWS = {
  health: () => state.health && health(),
  projects: () => fill("projects", state.projects.map((one) => [one.project, html`<b><bdi>${one.name}</bdi></b>`, one.kind, one.state, one.votes, one.tasks, one.settled, one.review, html`<${Actions} project=${one} />`])),
  people: () => fill("people", state.people.map((one) => [one.annotator, html`<${Named} name=${one.name} id=${one.annotator} />`, one.custodial ? "a peer" : "the annotator",
    one.answers, one.accepted, percent(one.agreement), percent(one.weight), one.points, html`${one.is_refused ? "refused " : one.is_here ? "enrolled " : ""}<${Refusal} person=${one} />`])),
  jobs: () => fill("jobs", state.jobs.map((job) => [job.job, html`<${Named} name=${job.name} id=${job.job} />`, job.queue_position ? `queued, position ${job.queue_position}` : job.state, `${job.queue_position ? "–" : Math.min(job.rounds_in_model + 1, job.rounds)} of ${job.rounds}`,
    Object.values(job.accepted).reduce((sum, count) => sum + count, 0), job.audit, job.state !== "finished" && html`<${Quiet} does="Cancel" run=${() => cancel(job)} />`])),
  log: () => fill("log", state.log.map((one) => [one.number, when(one.at_ms), html`<code>${one.operator}</code>`, one.action, one.about, one.result])),
};

function draw() {
  for (const link of allAt(".tabs a")) link.ariaCurrent = link.hash === `#${state.tab}` ? "true" : null;
  for (const section of allAt("[data-tab]")) section.hidden = section.dataset.tab !== state.tab;
  at("[href='#health']").textContent = state.alerts.length ? `Health (${state.alerts.length})` : "Health";
  DRAWS[state.tab]();
  const rest = { people: state.count > state.shown, log: state.log.length === state.shown && state.shown < 200 };
  for (const button of allAt(".more")) button.hidden = !rest[state.tab];
  for (const box of allAt(".checked")) render(state.checked && !box.closest("form").hidden ? html`<${Checked} checked=${state.checked} />` : null, box);
}

document.addEventListener("click", ({ target }) => {
  if (target.dataset.open) open(target.dataset.open);
  if (target.matches(".more")) { state.shown += PAGE; act(read); }
});
at("#sign-out").onclick = signOut;
at("#invite").onclick = () => once(async () => {
  at("#link").value = location.origin + (await ask("POST", `${ADMIN}/invite`, {})).path;
  at("#link").parentElement.hidden = false;
});
begin(read, draw);
