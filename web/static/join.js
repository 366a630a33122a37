// The page where people come in: what this network is for, then a name, a key and its backup; or an account, where the browser has
// no keys. Who is in already finds here what this browser keeps.
import { backup, opened } from "/static/backup.js";
import { hasKeys, made } from "/static/key.js";
import { Told, focused, html, paintStatus, patiently, render } from "/static/page.js";
import { call, sessionOf } from "/static/session.js";
import { Store } from "/static/store.js";
import { hex, unhex } from "/static/wire.js";

const PASSPHRASE_MIN = 10; // of a backup: whoever has the file guesses as fast as a machine can

const state = {
  network: null, stats: null, live: null, store: null, me: null, isHere: true, invitation: "",
  phase: "loading", // then `come`, `backup`, `known`
  file: null, // { name, text } of the backup that was just saved
  told: null, isBusy: false,
};

const go = () => location.assign("/annotate");

// What people do ---

// Of a form: does the work with its fields, and tells what is wrong.
const submits = (work, meanwhile) => async (event) => {
  event.preventDefault();
  if (state.isBusy) return;
  const fields = Object.fromEntries(new FormData(event.target));
  Object.assign(state, { isBusy: true, told: { text: meanwhile } });
  paint();
  state.told = null;
  try {
    await work(fields);
  } catch (problem) {
    state.told = { text: problem.message, kind: "bad" };
  }
  state.isBusy = false;
  paint();
};

async function keep(me) {
  navigator.storage?.persist?.(); // browsers that may forget what is old do not forget this
  await state.store.setMe(me);
  state.me = me;
}

const join = submits(async ({ name, invitation = "" }) => {
  await keep({ ...(state.me?.secret ? state.me : await made()), name: name.trim() }); // first: an enrolled key must not be lost
  await sessionOf(state.network, state.me).enrol(invitation.trim());
  if (!state.me.secret.extractable) return go();
  state.phase = "backup";
}, "The network decides …");

const save = submits(async ({ passphrase, again }) => {
  if (passphrase !== again) throw new Error("These are two passphrases: type the same one twice.");
  const file = await backup(state.me, passphrase);
  const me = await opened(file, passphrase); // so it opens, and no script can read this key again
  state.file = { name: `folkmoot-key-${me.name.replace(/[^\p{L}\p{N}]+/gu, "_")}.json`, text: JSON.stringify(file, null, 1) };
  download();
  await keep(me);
  state.phase = "known";
}, "Sealing …");

function download() {
  const href = URL.createObjectURL(new Blob([state.file.text], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href, download: state.file.name }).click();
}

const restore = submits(async ({ file, passphrase }) => {
  const read = await file.text().then(JSON.parse).catch(() => null);
  await keep(await opened(read, passphrase));
  try {
    await sessionOf(state.network, state.me).begun();
  } catch (problem) {
    if (problem.status !== 403) throw problem;
    throw new Error(`This key is not enrolled in ${state.network.name} yet. Type a name above to join with it.`);
  }
  go();
}, "Opening …");

const entering = (path) => submits(async ({ name, passphrase, invitation }) => {
  const body = { name: name.trim(), passphrase, ...(invitation !== undefined && { invitation: invitation.trim() }) };
  const { annotator } = await call("POST", path, body);
  await keep({ name: body.name, publicKey: unhex(annotator), isCustodial: true });
  go();
}, "Asking the peer …");
const [signUp, signIn] = [entering("/api/v1/sign-up"), entering("/api/v1/sign-in")];

// Answers that are not sent yet stay, and are sent when the same person is back.
const leave = submits(async () => {
  if (state.me.isCustodial) await call("POST", "/api/v1/sign-out");
  state.store.by = hex(state.me.publicKey);
  await state.store.change((rows) => ({ gone: rows.filter(({ state: at }) => at !== "held" && at !== "sent").map(({ assignment }) => assignment) }));
  await keep(null);
  Object.assign(state, { phase: "come", file: null });
}, "Leaving …");

// What people see ---

const Figure = ({ name, text, of }) => html`<div><dt>${text}</dt><dd data-live=${name}>${of.toLocaleString("en")}</dd></div>`;

function About() {
  const { annotators, annotations, projects } = state.stats;
  const { status, jobs } = state.live ?? { status: {}, jobs: [] }, running = jobs.filter((job) => job.state === "running");
  const open = projects.reduce((sum, { tasks, settled, review }) => sum + tasks - settled - review, 0);
  return html`<section class="about">
    <h1>Join ${state.network.name}</h1>
    <p>Peers of many people train one model here, and no company owns it. ${status.voters > 3 && `${status.voters} of them vote on what counts, so that no single one has to be trusted. `}
      Only people can say what a text means, or which of two answers is better. So you get short tasks, and the network decides which label follows.</p>
    <p data-live="training">${!state.live ? "" : running.length ? `At the moment it trains ${running.map(({ name, round, rounds }) => `${name}, round ${round} of ${rounds}`).join("; ")}.`
      : "At the moment nothing is trained: labels are made for what comes next."}</p>
    <dl class="figures">
      <${Figure} name="open" text="Open tasks" of=${open} /><${Figure} name="people" text="People" of=${annotators} />
      <${Figure} name="answers" text="Answers so far" of=${annotations} />
    </dl>
    ${projects.length > 0 && html`<p class="quiet small">They are about ${projects.slice(0, 5).map(({ name }) => name).join(", ")}.</p>`}
  </section>`;
}

const Passphrase = ({ name = "passphrase", text = "Passphrase", min, isNew, isFirst }) => html`
  <label>${text}<input type="password" name=${name} minlength=${min} maxlength="256" required autocomplete=${isNew ? "new-password" : "current-password"}
    ref=${isFirst ? focused : null} /></label>`;

const Invitation = () => state.network.sign_up !== "open" && html`
  <label>Invitation<input name="invitation" autocomplete="off" required defaultValue=${state.invitation} /></label>`;

const Name = ({ isFirst, text = "The name that others will see" }) => html`
  <label>${text}<input name="name" ref=${isFirst ? focused : null} maxlength="32" required autocomplete="username"
    defaultValue=${isFirst && state.me ? state.me.name : ""} /></label>`;

const Submit = ({ children }) => html`<button class="primary" disabled=${state.isBusy}>${children}</button>`;

const SignIn = ({ isFirst }) => html`<details open=${isFirst}><summary>I have an account at this peer</summary>
  <form onSubmit=${signIn}><${Name} isFirst=${isFirst} text="Name" /><${Passphrase} /><${Submit}>Sign in<//></form></details>`;

const FOR_EVER = "Everybody sees name and answers for ever: take a pseudonym.";

const KeyForm = () => html`
  <form onSubmit=${join}>
    <${Name} isFirst=${true} /><${Invitation} />
    <p class="quiet small">Your browser makes a key, and signs each of your answers with it: nobody can change one or invent one. ${FOR_EVER}</p>
    <${Submit}>Make my key<//>
  </form>
  <details>
    <summary>I have a backup of my key</summary>
    <form onSubmit=${restore}>
      <label>The file folkmoot-key-….json<input type="file" name="file" accept=".json,application/json" required /></label>
      <${Passphrase} text="Its passphrase" /><${Submit}>Restore my key<//>
    </form>
  </details>
  <${SignIn} />`;

const AccountForm = () => html`
  <div class="notice warn"><p><b>This peer will keep your key and sign for you.</b> ${isSecureContext ? "This browser makes no keys of this kind" : "Over plain http a browser makes no keys"}.
    So the peer seals one under your passphrase, and you trust the peer with it: the network marks your name as custodial for ever.
    ${isSecureContext ? " A newer browser keeps a key of your own." : " What you type passes unencrypted. At an address with https you keep a key of your own."}</p></div>
  ${state.me && html`<${SignIn} isFirst=${true} />`}
  <form onSubmit=${signUp}>
    <${Name} isFirst=${!state.me} /><${Passphrase} isNew=${true} min="8" /><${Invitation} />
    <p class="quiet small">A passphrase that is lost opens nothing: nobody can set another one. ${FOR_EVER}</p>
    <${Submit}>Let this peer sign for me<//>
  </form>
  ${!state.me && html`<${SignIn} />`}`;

const Come = () => html`<${About} />${hasKeys ? html`<${KeyForm} />` : html`<${AccountForm} />`}`;

const Backup = () => html`
  <h1>Save a backup of your key</h1>
  <p>The key is you, ${state.me.name}: only it can sign as you. It is in this browser alone. If the browser forgets it, or the machine is lost, nobody
    can make it anew, and you would begin again as somebody else. The backup is a file that only your passphrase opens.</p>
  <form onSubmit=${save}>
    <${Passphrase} isNew=${true} isFirst=${true} min=${PASSPHRASE_MIN} text="A passphrase for the file: several words" />
    <${Passphrase} isNew=${true} min=${PASSPHRASE_MIN} name="again" text="The same again" />
    <div class="row"><${Submit}>Save the backup<//><button type="button" onClick=${go}>Remind me later</button></div>
  </form>
  <p class="quiet small">After that no script can read the key out of this browser again, not even that of this page. Until then one could.</p>`;

const Known = () => html`
  <h1>You annotate as ${state.me.name}</h1>
  ${state.file && html`<p class="notice" role="status"><span>Saved as <b>${state.file.name}</b>, if your browser did so. Keep a copy of it on another machine.</span>
    <button type="button" onClick=${download}>Save it again</button></p>`}
  <p>${state.me.isCustodial ? "This peer keeps your key, and signs for you while you are signed in." : "This browser keeps your key. No script can read it."}
    ${" "}Its number is <code>${hex(state.me.publicKey).slice(0, 8)}</code>.</p>
  <p><button class="primary" ref=${focused} onClick=${go}>Annotate</button></p>
  <details>
    <summary>${state.me.isCustodial ? "Sign out" : "Remove my key from this browser"}</summary>
    <form onSubmit=${leave}>
      <p>${state.me.isCustodial ? "Your list of answers leaves this browser. The answers stay decided." : "Without the backup and its passphrase nobody can make this key anew."}
        ${" "}Answers that are not sent yet wait here until you are back.</p>
      <button disabled=${state.isBusy}>${state.me.isCustodial ? "Sign out" : "Remove it"}</button>
    </form>
  </details>`;

const PHASES = { loading: () => html`<p class="quiet">Asking the peer …</p>`, come: Come, backup: Backup, known: Known };

function paint() {
  const Phase = PHASES[state.phase];
  render(html`<section class="card narrow" data-state=${state.phase}>
    ${!state.isHere && html`<p class="notice warn" role="status">This peer does not answer at the moment. The page goes on when it is back.</p>`}
    <${Phase} /><${Told} told=${state.told} />
  </section>`, document.getElementById("join"));
  paintStatus({ ...state, who: state.phase !== "come" && state.me?.name });
}

function away() {
  state.isHere = false;
  paint();
}

// The address has the invitation, and nobody is to see it over the shoulder.
function takeInvitation() {
  state.invitation = location.hash.slice(1) || state.invitation;
  history.replaceState(null, "", location.pathname);
}

async function start() {
  state.network = await patiently("/api/v1/network", away);
  state.live = await call("GET", "/api/v1/live").catch(() => null); // a look at the whole peer: people come in without it
  state.stats = await patiently("/api/stats", away);
  Object.assign(state, { isHere: true, phase: "come", store: await Store.open(state.network.chain_id) });
  takeInvitation();
  state.me = await state.store.me() ?? null;
  if (state.me) {
    try {
      await sessionOf(state.network, state.me).begun();
      state.phase = state.me.secret?.extractable ? "backup" : "known";
    } catch (problem) {
      const text = state.me.isCustodial ? "You are signed out here. Answers that are not sent yet wait in this browser."
        : problem.status === 403 ? "This browser has a key for you that the network does not know yet. Go on to enrol it." : problem.message;
      state.told = { text, kind: "warn" };
    }
  }
  paint();
}

paint();
start().catch((problem) => {
  state.told = { text: problem.message, kind: "bad" };
  paint();
});
