// The page where annotators join: about the network, then a name, a key and its backup. A browser that cannot create keys gets an
// account instead. Annotators who have joined see their key or account here. The texts are in the template.
import { backup, opened } from "/static/backup.js";
import { hasKeys, made } from "/static/key.js";
import { allAt, at, copied, focused, forms, paintStatus, patiently, tell } from "/static/page.js";
import { call, sessionOf } from "/static/session.js";
import { Store } from "/static/store.js";
import { hex, unhex } from "/static/wire.js";

const state = {
  network: null, stats: null, live: null, store: null, me: null, isHere: true, invitation: "", isBusy: false,
  file: null, // { name, text } of the backup saved last
};

// Rendering ---

const counted = (count) => count.toLocaleString("en");

function aboutNetwork() {
  const { annotators, annotations, projects } = state.stats, isBack = !hasKeys && state.me;
  const running = state.live?.jobs.filter((job) => job.state === "running"), voters = state.live?.status.voters;
  return {
    network: state.network.name, voters, isAlone: voters === 1, isShared: voters !== 1, isFew: voters > 1 && voters < 4, isMany: voters > 3, isIdle: running?.length === 0,
    trained: running?.map(({ name, rounds_in_model, rounds }) => `${name}, round ${Math.min(rounds_in_model + 1, rounds)} of ${rounds}`).join("; "),
    open: counted(projects.reduce((sum, { tasks, settled, review }) => sum + tasks - settled - review, 0)),
    people: counted(annotators), answers: counted(annotations), projects: projects.slice(0, 5).map(({ name }) => name).join(", "),
    hasKeys, isKept: !hasKeys, isSecure: isSecureContext, isPlain: !isSecureContext, isBack, isNew: !isBack, isInvited: state.network.sign_up !== "open",
  };
}

const aboutMe = ({ name, publicKey, isCustodial }) => ({ name, isCustodial, isOwn: !isCustodial, number: hex(publicKey).slice(0, 8), file: state.file?.name });

// `phase` is `come`, `backup` or `known`.
function show(phase) {
  at("#phase").replaceChildren(copied(phase, phase === "come" ? aboutNetwork() : aboutMe(state.me)));
  at("#join").dataset.state = phase;
  for (const field of allAt("[name=invitation]")) field.value = state.invitation;
  const first = at("#phase :is(input, .primary)");
  if (first.name === "name") first.value = state.me?.name ?? "";
  focused(first);
  paint();
}

function paint() {
  for (const button of allAt("form button:not([type])")) button.disabled = state.isBusy;
  paintStatus({ ...state, who: at("#join:is([data-state=backup], [data-state=known])") && state.me.name });
}

// Actions ---

const does = { go: () => location.assign("/annotate"), download };
document.addEventListener("click", ({ target }) => does[target.closest("[data-does]")?.dataset.does]?.());

// Returns a form's handler, which runs `work` with the fields and shows its problem.
const submits = (work, meanwhile) => async (fields) => {
  if (state.isBusy) return;
  state.isBusy = true;
  tell(meanwhile);
  paint();
  try {
    if (hex((await state.store.me())?.publicKey ?? []) !== hex(state.me?.publicKey ?? [])) return location.reload(); // Another tab has changed the annotator.
    await work(fields);
    tell();
  } catch (problem) {
    tell(problem.message, "bad");
  }
  state.isBusy = false;
  paint();
};

async function keep(me) {
  navigator.storage?.persist?.(); // asks the browser never to evict the key
  await state.store.setMe(me);
  state.me = me;
}

forms.make = submits(async ({ name, invitation = "" }) => {
  await keep({ ...(state.me?.secret ? state.me : await made()), name: name.trim() }); // stored first, so that an enrolled key is never lost
  await sessionOf(state.network, state.me).enrol(invitation.trim());
  if (state.me.secret.extractable) show("backup");
  else does.go();
}, "Waiting for the network …");

forms.save = submits(async ({ passphrase, again }) => {
  if (passphrase !== again) throw new Error("The two passphrases differ. Type the same passphrase twice.");
  const file = await backup(state.me, passphrase);
  const me = await opened(file, passphrase); // proves that the file opens; this copy of the key cannot be exported
  state.file = { name: `folkmoot-key-${me.name.replace(/[^\p{L}\p{N}]+/gu, "_")}.json`, text: JSON.stringify(file, null, 1) };
  download();
  await keep(me);
  show("known");
}, "Encrypting …");

function download() {
  const href = URL.createObjectURL(new Blob([state.file.text], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href, download: state.file.name }).click();
}

forms.restore = submits(async ({ file, passphrase }) => {
  const read = await file.text().then(JSON.parse).catch(() => null);
  await keep(await opened(read, passphrase));
  try {
    await sessionOf(state.network, state.me).begun();
  } catch (problem) {
    if (problem.status !== 403) throw problem;
    throw new Error(`This key is not enrolled in ${state.network.name} yet. Type a name above to join with this key.`);
  }
  does.go();
}, "Decrypting …");

const entering = (path) => submits(async ({ name, passphrase, invitation }) => {
  const body = { name: name.trim(), passphrase, ...(invitation !== undefined && { invitation: invitation.trim() }) };
  const { annotator } = await call("POST", path, body);
  await keep({ name: body.name, publicKey: unhex(annotator), isCustodial: true });
  does.go();
}, "Signing in …");
forms["sign-up"] = entering("/api/v1/sign-up");
forms["sign-in"] = entering("/api/v1/sign-in");

// Unsent answers stay, and are sent when the same annotator returns.
forms.leave = submits(async () => {
  if (state.me.isCustodial) await call("POST", "/api/v1/sign-out");
  state.store.by = hex(state.me.publicKey);
  await state.store.change((rows) => ({ gone: rows.filter(({ state: at }) => at !== "held" && at !== "sent").map(({ assignment }) => assignment) }));
  await keep(null);
  state.file = null;
  show("come");
}, "Please wait …");

// Start ---

function away() {
  state.isHere = false;
  paint();
}

// Takes the invitation code out of the address, so that bystanders cannot read it.
function takeInvitation() {
  state.invitation = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
}

async function start() {
  state.network = await patiently("/api/v1/network", away);
  state.live = await call("GET", "/api/v1/live").catch(() => null); // optional: joining works without it
  state.stats = await patiently("/api/stats", away);
  Object.assign(state, { isHere: true, store: await Store.open(state.network.chain_id) });
  takeInvitation();
  state.me = await state.store.me() ?? null;
  if (!state.me) return show("come");
  try {
    await sessionOf(state.network, state.me).begun();
    show(state.me.secret?.extractable ? "backup" : "known");
  } catch (problem) {
    show("come");
    tell(state.me.isCustodial ? "You are signed out. Sign in to send the answers that wait in this browser."
      : problem.status === 403 ? "This browser has a key that is not enrolled yet. Continue below to enrol it." : problem.message, "warn");
  }
}

paint();
start().catch((problem) => tell(problem.message, "bad"));
