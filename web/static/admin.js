// The page of operators: projects, people, jobs, health, alerts, and what operators did.
import { Table, act, ask, begin, desk, paint, signOut, sure, tell, when } from "/static/operator.js";
import { html } from "/static/page.js";

const ADMIN = "/api/v1/admin", PROJECTS = "/api/v1/projects";
const KINDS = { label: "choose an option", rating: "rate", pair: "which of two is better", ranking: "order several" };
const TABS = { health: "Health", projects: "Projects", people: "People", jobs: "Jobs", log: "Log" };
const PAGE = 50;

const state = {
  tab: "health", health: null, alerts: [], projects: [], people: null, jobs: [], log: [],
  search: "", peopleShown: PAGE, logShown: PAGE,
  open: "", // the form that is shown: `make`, `train`, or `import ID`
  checked: null, // what the peer says of a file
  link: "", // of an invitation
};

const READS = {
  health: async () => { state.health = await ask("GET", `${ADMIN}/health`); },
  projects: async () => { ({ projects: state.projects } = await ask("GET", PROJECTS)); },
  people: async () => { state.people = await pages(state.peopleShown, (offset) => `${ADMIN}/people?search=${encodeURIComponent(state.search)}&offset=${offset}&limit=${PAGE}`); },
  jobs: async () => { ({ jobs: state.jobs } = await ask("GET", `${ADMIN}/jobs`)); },
  log: async () => { ({ entries: state.log } = await ask("GET", `${ADMIN}/log?limit=${state.logShown}`)); },
};

async function pages(count, path) {
  const found = { count: 0, people: [] };
  for (let offset = 0; offset < count; offset += PAGE) {
    const part = await ask("GET", path(offset));
    found.count = part.count;
    found.people.push(...part.people);
  }
  return found;
}

async function read() {
  const wanted = location.hash.slice(1);
  if (wanted in TABS) state.tab = wanted;
  ({ alerts: state.alerts } = await ask("GET", `${ADMIN}/alerts`));
  await READS[state.tab]();
}

const show = (changes) => { Object.assign(state, changes); paint(); };
const shut = () => show({ open: "", checked: null });
const NotNow = () => html`<button type="button" class="quiet" onClick=${shut}>Not now</button>`;
const Card = ({ title, children }) => html`<section class="card" aria-label=${title}><h2>${title}</h2>${children}</section>`;
const Opens = ({ form, children }) => html`<p><button class="primary" onClick=${() => show({ open: form })}>${children}</button></p>`;

function turn(tab) {
  history.replaceState(null, "", `#${tab}`);
  state.tab = tab;
  shut();
  act(read); // at once
}

const post = (path, body, text) => act(async () => { await ask("POST", path, body); return text; });
const said = (path, body) => act(async () => (await ask("POST", path, body)).said);
const fields = (event) => { event.preventDefault(); return Object.fromEntries(new FormData(event.target.form ?? event.target)); };
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
const bytes = (count) => (count < 2 ** 30 ? `${Math.ceil(count / 2 ** 20)} MiB` : `${(count / 2 ** 30).toFixed(1)} GiB`);

// Health and alerts --------------------------------------------------------------------------------------------------

const Alerts = () => html`<${Card} title="Alerts">
  ${state.alerts.length ? html`<ul class="alerts">${state.alerts.map(({ severity, cause, about, text, since_ms }) => html`
    <li key=${cause + about} data-alert=${cause} class=${severity}><b>${severity}</b> ${text} <span class="quiet small">since ${when(since_ms)}</span></li>`)}</ul>`
    : html`<p class="quiet">Nothing needs you.</p>`}<//>`;

function Health() {
  const it = state.health;
  if (!it) return html`<p class="quiet">Asking the peer …</p>`;
  const figures = {
    State: it.problem || it.state, Height: it.height, Behind: it.behind === null ? "unknown: nobody is there to say" : `${it.behind} heights`,
    "Last decision": it.decided_seconds_ago === null ? "none yet" : `${it.decided_seconds_ago.toFixed(0)} s ago`, Links: it.links,
    "Runs for": `${(it.uptime_seconds / 3600).toFixed(1)} h`, Memory: bytes(it.memory_bytes), "Data directory": bytes(it.disk.used_bytes),
    "Disk free": `${bytes(it.disk.free_bytes)} of ${bytes(it.disk.total_bytes)}`, "Answers that wait": it.queues.statements_waiting,
    "Transactions that wait": it.queues.transactions_pending, Program: `${it.versions.program}, wire ${it.versions.wire}`,
    Modules: it.versions.modules.map(({ module, runs }) => `${module} ${runs}`).join(", "),
  };
  return html`<${Alerts} /><${Card} title="Health">
    <dl class="facts">${Object.entries(figures).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl><//>`;
}

// Projects -----------------------------------------------------------------------------------------------------------

const formatOf = ({ name }) => ({ csv: "csv", json: "json" })[name.split(".").pop().toLowerCase()] ?? "jsonl";

// What the form says now, and what of it the peer is asked.
function draft(form) {
  const data = new FormData(form), kind = data.get("kind");
  const hasOptions = kind === "label" || kind === "rating";
  return {
    file: data.get("file"),
    asked: {
      name: data.get("name").trim(), kind, options: hasOptions ? lines(data.get("options")) : [], many: kind === "label" && data.has("many"),
      votes: Number(data.get("votes")), price: Number(data.get("price")), guidelines: data.get("guidelines"), suggests_first: data.has("suggests_first"),
    },
  };
}

const seen = (path, file, more) => act(async () => {
  const found = await ask("POST", `${path}format=${formatOf(file)}`, file);
  state.checked = { ...found, file, ...more };
});

function preview(event) {
  event.preventDefault();
  const { file, asked } = draft(event.target);
  const query = new URLSearchParams({ kind: asked.kind, options: asked.options.join("\n"), many: Number(asked.many) });
  seen(`${PROJECTS}/check?${query}&`, file, { asked });
}

const send = async (project, file) => {
  const { tasks } = await ask("POST", `${PROJECTS}/${project}/tasks?format=${formatOf(file)}`, file);
  const text = `Tasks of this project: ${tasks}${state.checked.count > tasks ? ", and the others follow" : ""}.`;
  shut();
  return text;
};

const make = ({ asked, items, file }) => act(async () => send((await ask("POST", PROJECTS, { ...asked, items })).project, file));

const Problems = ({ problems }) => html`<div class="notice bad" role="alert"><p>Nothing is imported yet: these lines are no tasks.</p>
  <ul data-problems>${problems.map((problem) => html`<li>${problem}</li>`)}</ul></div>`;

function Checked({ yes, run }) {
  const { checked } = state;
  if (checked.problems.length) return html`<${Problems} problems=${checked.problems} />`;
  const { options, guidelines } = checked.asked ?? { options: [] };
  return html`<section class="preview" data-preview aria-label="Preview"><h3>${checked.count} tasks; the first as annotators see them</h3>
    ${guidelines && html`<details><summary>Guidelines</summary><p class="text small">${guidelines}</p></details>`}
    <ol>${checked.preview.map(({ text, items }) => html`<li><p class="text small">${text}</p>
      ${items.length > 0 && html`<ul>${items.map((item) => html`<li>${item}</li>`)}</ul>`}</li>`)}</ol>
    ${options.length > 0 && html`<p>${options.map((option, index) => html`<span class="option"><kbd>${index + 1}</kbd> ${option}</span> `)}</p>`}
    <button class="primary" type="button" onClick=${() => run(checked)}>${yes}</button></section>`;
}

const Looks = ({ yes, run }) => html`<label>File of tasks: JSONL, CSV or Label Studio's JSON, at most 16 MiB
    <input type="file" name="file" accept=".jsonl,.csv,.json" required /></label>
  <div class="tools"><button class=${state.checked ? "" : "primary"}>Look at the file</button><${NotNow} /></div>
  ${state.checked && html`<${Checked} yes=${yes} run=${run} />`}`;

const changed = () => { if (state.checked) show({ checked: null }); }; // what was seen is another form's

const Make = () => html`<form class="card" onSubmit=${preview} onInput=${changed} aria-label="A new project">
  <h2>A new project</h2>
  <div class="columns">
    <label>Name<input name="name" required maxlength="64" autocomplete="off" /></label>
    <label>What is asked<select name="kind">${Object.entries(KINDS).map(([kind, text]) => html`<option value=${kind}>${kind}: ${text}</option>`)}</select></label>
    <label>Votes of a task, at most<input name="votes" type="number" min="1" max="7" defaultValue="2" required /></label>
    <label>Points for a task<input name="price" type="number" min="0" max="1000000" defaultValue="1" required /></label>
  </div>
  <label>Options of a label or a rating, one a line<textarea name="options" rows="3"></textarea></label>
  <label class="check"><input type="checkbox" name="many" /> Several options may fit</label>
  <label class="check"><input type="checkbox" name="suggests_first" /> Show suggestions with the task, not after the answer</label>
  <label>Guidelines, which annotators read first<textarea name="guidelines" rows="3"></textarea></label>
  <${Looks} yes="Make the project" run=${make} />
</form>`;

const Import = ({ project }) => html`<form class="card" onInput=${changed} aria-label="Import tasks"
    onSubmit=${(event) => seen(`${PROJECTS}/${project.project}/tasks?check=1&`, fields(event).file)}>
  <h2>More tasks for ${project.name}</h2>
  <${Looks} yes=${`Import ${state.checked?.count} tasks`} run=${({ file }) => act(() => send(project.project, file))} />
</form>`;

const Redact = ({ project: { project, name, tasks } }) => html`<form class="card" aria-label="Redact a task" onSubmit=${(event) => {
    const { task, reason } = fields(event);
    sure(`Take out the text of task ${task}?`, "Every peer deletes it. Nobody can bring it back.", "Take it out",
      () => said(`${PROJECTS}/${project}/redact`, { task: Number(task), reason }));
  }}>
  <h2>Take a text out of ${name}</h2><div class="columns">
    <label>Number of the task<input name="task" type="number" min="0" max=${tasks - 1} required /></label>
    <label>Reason, for the log of this peer<input name="reason" maxlength="100" autocomplete="off" /></label></div>
  <div class="tools"><button class="primary">Redact …</button><${NotNow} /></div>
</form>`;

const moved = (project, call, text) => post(`${PROJECTS}/${project.project}/${call}`, {}, `${project.name} is ${text}.`);

function Actions({ project }) {
  const form = (name) => html`<button class="quiet" onClick=${() => show({ open: `${name} ${project.project}`, checked: null })}>${name}</button>`;
  if (!project.is_mine) return "another member's";
  const isOpen = project.state === "open";
  return html`<div class="tools"><a href=${`/review#${project.project}`}>review</a>
    ${project.state !== "closed" && html`
      <button class="quiet" onClick=${() => (isOpen ? moved(project, "pause", "paused") : moved(project, "open", "open"))}>${isOpen ? "pause" : "open"}</button>
      ${form("import")}
      <button class="quiet" onClick=${() => sure(`Close ${project.name} for ever?`, "Its points are divided, and nobody answers its tasks any more.",
        "Close it", () => moved(project, "close", "closed"))}>close</button>`}
    ${form("redact")}</div>`;
}

function Projects() {
  const [name, id] = state.open.split(" "), project = state.projects.find((one) => one.project === id);
  const Form = { make: Make, import: project && Import, redact: project && Redact }[name];
  return html`${Form ? html`<${Form} key=${state.open} project=${project} />` : html`<${Opens} form="make">New project<//>`}
    <${Card} title="Projects"><${Table} caption="Those of all members, open ones first" empty="No project yet."
      heads=${["Project", "Kind", "State", "Votes", "Tasks", "Settled", "Wait for you", "Actions"]}
      rows=${state.projects.map((one) => ({ key: one.project, "data-project": one.project,
        cells: [html`<b>${one.name}</b>`, one.kind, one.state, one.votes, one.tasks, one.settled, one.review, html`<${Actions} project=${one} />`] }))} /><//>`;
}

// People -------------------------------------------------------------------------------------------------------------

const invite = () => act(async () => { state.link = location.origin + (await ask("POST", `${ADMIN}/invite`, {})).path; });

function Person({ person: { annotator, name, is_refused } }) {
  const path = `${ADMIN}/people/${annotator}`;
  return is_refused ? html`<button onClick=${() => post(`${path}/allow`, {}, `${name} gets tasks here again.`)}>allow</button>`
    : html`<button class="quiet" onClick=${() => sure(`Refuse ${name}?`, "This peer gives it no more tasks. Answers that it gave still count, and other peers may serve it.",
      "Refuse", () => post(`${path}/refuse`, {}, `${name} gets no more tasks here.`))}>refuse</button>`;
}

const People = () => html`
  <${Card} title="Invite"><div class="tools"><button class="primary" onClick=${invite}>New invitation</button></div>
    ${state.link && html`<label>It enrols one annotator. Send this address to nobody else:<input readonly value=${state.link} data-link onFocus=${(event) => event.target.select()} /></label>`}<//>
  <${Card} title="Annotators">
    <form onSubmit=${(event) => { state.search = fields(event).search; state.peopleShown = PAGE; act(read); }} role="search" class="tools">
      <label>Name, or the beginning of a key<input name="search" type="search" defaultValue=${state.search} /></label><button>Search</button></form>
    <${Table} caption=${`${state.people?.count ?? 0} of the network; those with most answers first`} empty="Nobody yet."
      heads=${["Annotator", "Key", "Answers", "Accepted", "As the label", "Weight", "Points", "This peer"]}
      rows=${(state.people?.people ?? []).map((one) => ({ key: one.annotator, "data-annotator": one.annotator, cells: [
        html`<b>${one.name}</b> <code>${one.annotator.slice(0, 8)}</code>`, one.custodial ? "kept by its peer" : "its own", one.answers, one.accepted,
        percent(one.agreement), percent(one.weight), one.points, html`${one.is_refused ? "refused " : one.is_here ? "serves it " : ""}<${Person} person=${one} />`] }))} />
    ${state.people?.count > state.peopleShown && html`<button onClick=${() => { state.peopleShown += PAGE; act(read); }}>More</button>`}<//>`;

// Jobs ---------------------------------------------------------------------------------------------------------------

function train(event) {
  const { name, data, rounds, overrides } = fields(event);
  const pairs = lines(overrides).map((line) => line.split("=").map((part) => part.trim()));
  act(async () => {
    await ask("POST", `${ADMIN}/jobs`, { name: name.trim(), data, rounds: Number(rounds), overrides: Object.fromEntries(pairs) });
    state.open = "";
    return "The job is on the log.";
  });
}

const Train = () => html`<form class="card" onSubmit=${train} aria-label="A new job"><h2>A new job</h2><div class="columns">
    <label>Name<input name="name" required maxlength="64" autocomplete="off" /></label>
    <label>Text<select name="data"><option value="built-in">the built-in text</option><option value="local">each trainer's own text</option></select></label>
    <label>Rounds<input name="rounds" type="number" min="1" max="1000000" defaultValue="80" required /></label></div>
  <label>Other fields, one a line, such as <code>model.width=64</code><textarea name="overrides" rows="3"></textarea></label>
  <div class="tools"><button class="primary">Start it</button><${NotNow} /></div>
</form>`;

const Jobs = () => html`
  ${state.open === "train" ? html`<${Train} />` : html`<${Opens} form="train">New job<//>`}
  <${Card} title="Jobs"><${Table} caption="In the order in which they began; then the line" empty="No job yet."
    heads=${["Job", "State", "Round", "Accepted", "Audit", "Actions"]}
    rows=${state.jobs.map((job) => ({ key: job.job, "data-job": job.job, cells: [html`<b>${job.name}</b> <code>${job.job.slice(0, 8)}</code>`,
      job.place ? `waits, place ${job.place}` : job.state, `${job.round} of ${job.rounds}`, Object.values(job.accepted).reduce((sum, count) => sum + count, 0), job.audit,
      job.state === "finished" ? "" : html`<button class="quiet" onClick=${() => sure(`Cancel ${job.name}?`, "Its author alone ends it; else a quorum of voters has to say so.",
        "Cancel the job", () => said(`${ADMIN}/jobs/${job.job}/cancel`, {}))}>cancel</button>`] }))} /><//>`;

const Log = () => html`<${Card} title="What operators did here">
  <${Table} caption="The newest first. An operator is the beginning of its token's hash" empty="Nothing yet." heads=${["When", "Operator", "Action", "About", "Result"]}
    rows=${state.log.map((one) => ({ key: one.number, cells: [when(one.at_ms), html`<code>${one.operator}</code>`, one.action, one.about, one.result] }))} />
  ${state.log.length === state.logShown && state.logShown < 200 && html`<button onClick=${() => { state.logShown += PAGE; act(read); }}>More</button>`}<//>`;

const SHOWN = { health: Health, projects: Projects, people: People, jobs: Jobs, log: Log };

const Work = () => html`<h1>Administer ${desk.network?.name}</h1>
  <nav class="tools tabs" aria-label="Sections">${Object.entries(TABS).map(([tab, text]) => html`
    <button type="button" aria-current=${tab === state.tab ? "true" : null} onClick=${() => turn(tab)}>${text}${tab === "health" && state.alerts.length ? ` (${state.alerts.length})` : ""}</button>`)}
    <button type="button" class="quiet" onClick=${signOut}>Sign out</button></nav>
  <${SHOWN[state.tab]} />`;

begin("admin", Work, read);
