// The plain labelling page: a key of one's own, tasks, answers. Keys 1 to 9 choose, Enter sends several, s skips.
import { commitment, hex, sign, unhex } from "/static/wire.js";

const at = (id) => document.getElementById(id);
const state = { network: null, keys: null, token: "", tasks: [], chosen: [], sent: 0, busy: false, guidelines: new Map() };
const PAIR = ["the first", "the second", "a tie", "both bad"];

async function call(method, path, body, token = "") {
  const headers = { ...(body ? { "Content-Type": "application/json" } : {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const reply = await fetch(path, { method, headers, body: body ? JSON.stringify(body) : undefined });
  const said = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(said.detail ?? reply.statusText), { status: reply.status });
  return said;
}

function tell(text, isProblem = false) {
  at("told").textContent = text;
  at("told").className = isProblem ? "problem" : "";
}

const storage = () => `folkmoot ${state.network.chain_id}`;

function useSeed(seed) {
  state.keys = nacl.sign.keyPair.fromSeed(seed);
  localStorage.setItem(storage(), hex(seed));
}

async function enrol(event) {
  event.preventDefault();
  try {
    if (!state.keys) useSeed(nacl.randomBytes(32));
    const name = at("name").value.trim();
    const signature = sign(state.keys.secretKey, state.network.chain_id, "enrol", [name, unhex(state.network.peer_key), false]);
    tell("the network decides …");
    const body = { key: hex(state.keys.publicKey), name, signature: hex(signature), invitation: at("invitation").value.trim() };
    await call("POST", "/api/v1/annotators", body);
    await begin();
  } catch (problem) {
    if (problem.status === 409) { localStorage.removeItem(storage()); state.keys = null; }
    tell(problem.message, true);
  }
}

async function begin() {
  const key = hex(state.keys.publicKey);
  const { nonce, expires_ms } = await call("POST", "/api/v1/challenges", { key });
  const fields = [unhex(state.network.peer_key), unhex(nonce), expires_ms];
  const signature = hex(sign(state.keys.secretKey, state.network.chain_id, "session", fields));
  state.token = (await call("POST", "/api/v1/sessions", { key, nonce, expires_ms, signature })).token;
  at("sign-up").hidden = true;
  at("work").hidden = at("copy").hidden = false;
  at("me").textContent = key.slice(0, 8);
  tell("");
  await next();
}

async function next() {
  while (!state.tasks.length) {
    const waiting = setTimeout(() => tell("waiting for tasks …"), 800);
    try {
      state.tasks = (await call("GET", "/api/tasks?limit=8", null, state.token)).tasks;
    } catch (problem) {
      if (problem.status === 401) return begin();
      tell(problem.message, true);
      await new Promise((resolve) => setTimeout(resolve, 3000));
    }
    clearTimeout(waiting);
    if (!state.tasks.length) rest();
  }
  if (at("told").textContent === "waiting for tasks …") tell("");
  show(state.tasks[0]);
}

function rest() {
  at("asked").textContent = "";
  at("task").textContent = "No tasks for you at the moment. New ones appear here.";
  at("task").hidden = false;
  at("skip").hidden = true;
  at("choices").replaceChildren();
}

// Read once a project, and open until the first answer.
async function guide(task) {
  const path = task.guidelines ?? "";
  if (at("guidelines").dataset.path === path) return;
  at("guidelines").dataset.path = path;
  at("guidelines").hidden = true;
  if (!path) return;
  if (!state.guidelines.has(path)) {
    const reply = await fetch(path);
    if (!reply.ok) { delete at("guidelines").dataset.path; return; }
    state.guidelines.set(path, await reply.text());
    at("guidelines").open = true;
  }
  if (at("guidelines").dataset.path !== path) return;
  at("how").textContent = state.guidelines.get(path);
  at("guidelines").hidden = false;
}

const textsOf = (task) => ({ label: task.options, rating: task.options, pair: [...(task.items ?? []), ...PAIR.slice(2)], ranking: task.items })[task.kind];

function inWords(task, answer) {
  const texts = task.kind === "pair" ? PAIR : textsOf(task);
  const words = answer.map((choice) => texts[task.kind === "rating" ? choice - 1 : choice]);
  return words.join(task.kind === "ranking" ? " > " : ", ") || "none of them";
}

function suggest(text) { at("suggested").textContent = text; }

function show(task) {
  state.chosen = [];
  guide(task);
  if (task.suggestion) suggest(`A model suggests: ${inWords(task, task.suggestion)}`);
  const asked = { label: task.many ? "Choose all that fit, then Enter" : "Choose one", rating: "Rate it", pair: "Which is better?", ranking: "Choose the best first" };
  at("asked").textContent = asked[task.kind];
  at("task").textContent = task.text ?? "";
  at("task").hidden = !task.text;
  at("skip").hidden = false;
  at("choices").replaceChildren(...textsOf(task).map((text, index) => {
    const button = document.createElement("button");
    const key = document.createElement("kbd");
    key.textContent = index + 1;
    button.append(key, text);
    button.setAttribute("aria-pressed", "false");
    button.onclick = () => choose(index);
    return button;
  }));
}

function choose(index) {
  const task = state.tasks[0];
  if (!task || state.busy || index >= at("choices").children.length) return;
  const button = at("choices").children[index];
  if (task.kind === "rating") return submit([index + 1]);
  if (task.kind === "pair" || (task.kind === "label" && !task.many)) return submit([index]);
  const known = state.chosen.indexOf(index);
  if (known < 0) state.chosen.push(index); else state.chosen.splice(known, 1);
  button.setAttribute("aria-pressed", String(known < 0));
  if (task.kind === "ranking" && state.chosen.length === task.items.length) submit([...state.chosen]);
}

async function submit(answer) {
  const task = state.tasks[0], assignment = unhex(task.assignment), salt = nacl.randomBytes(16);
  state.busy = true;
  const signature = sign(state.keys.secretKey, state.network.chain_id, "annotation", [assignment, commitment(assignment, salt, answer)]);
  const body = { assignment: task.assignment, answer, salt: hex(salt), signature: hex(signature) };
  state.tasks.shift();
  at("guidelines").open = false;
  suggest("");
  const sending = call("POST", "/api/submit", body, state.token).then(
    (reply) => {
      state.sent += 1;
      at("count").textContent = `${state.sent} decided`;
      if (reply.suggestion) suggest(`Of the task before: you said ${inWords(task, answer)}, a model ${inWords(task, reply.suggestion)}`);
    },
    (problem) => tell(problem.message, true),
  );
  state.busy = false;
  if (!state.tasks.length) await sending;
  await next();
}

async function skip() {
  const task = state.tasks.shift();
  if (!task) return;
  suggest("");
  await call("POST", `/api/v1/assignments/${task.assignment}/skip`, { reason: "skipped" }, state.token).catch((problem) => tell(problem.message, true));
  await next();
}

document.addEventListener("keydown", (event) => {
  if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^[1-9]$/.test(event.key)) choose(Number(event.key) - 1);
  else if (event.key === "s") skip();
  else if (event.key === "Enter" && state.tasks[0]?.many) { event.preventDefault(); submit([...state.chosen].sort((a, b) => a - b)); }
});

at("enrol").onsubmit = enrol;
at("restore").onsubmit = async (event) => {
  event.preventDefault();
  try { useSeed(unhex(at("key").value)); await begin(); } catch (problem) { tell(problem.message, true); }
};
at("skip").onclick = skip;
// Pages over plain HTTP have no clipboard, unless they are of this machine.
at("copy").onclick = async () => {
  const key = localStorage.getItem(storage());
  try { await navigator.clipboard.writeText(key); tell("the key is in your clipboard: keep it where nobody else looks"); }
  catch { tell(`keep your key where nobody else looks: ${key}`); }
};

state.network = await call("GET", "/api/v1/network");
at("network").textContent = `network ${state.network.name}`;
at("invited").hidden = state.network.sign_up === "open";
const seed = localStorage.getItem(storage());
if (seed) {
  state.keys = nacl.sign.keyPair.fromSeed(unhex(seed));
  begin().catch((problem) => { at("sign-up").hidden = false; tell(problem.message, true); });
} else at("sign-up").hidden = false;
