// Tasks that are assigned to this annotator. Three are prefetched, so that the next one is shown at once. No two tabs show the same task.
import { pause } from "/static/page.js";

const AHEAD = 3;
const LEASES_MAX = 8;
const AGAIN_MS = 1_000;
const BEAT_MS = 15_000; // the peer releases a lease 45 s after its last heartbeat
const LOCK = "folkmoot task ";

// Claims an assignment for this tab. Returns a function that releases it, or undefined if another tab has it.
function claimed(assignment) {
  if (!navigator.locks) return Promise.resolve(() => {});
  return new Promise((resolve) => {
    const isOver = navigator.locks.request(LOCK + assignment, { ifAvailable: true }, (lock) => {
      if (!lock) return resolve();
      return new Promise((end) => resolve(() => { end(); return isOver; }));
    });
  });
}

const isOf = (project, task) => !project || task.project === project;

async function claims() {
  const held = navigator.locks ? (await navigator.locks.query()).held : [];
  return held.filter(({ name }) => name.startsWith(LOCK)).map(({ name }) => name.slice(LOCK.length));
}

export class Leases {
  tasks = []; // the task shown comes first
  isEmpty = false; // The peer has no tasks for this annotator.
  project = ""; // project from which tasks are requested; empty: all
  #releases = new Map();
  #asking = false;

  constructor(session, queue, changed) {
    this.session = session;
    this.queue = queue;
    this.changed = changed; // called with the problem, if any, and the project of the request
    this.#beatOften();
  }

  async #beatOften() {
    for (;; await pause(BEAT_MS)) this.beat();
  }

  // Tells the peer which tasks are open and which answers are not sent yet. A failed heartbeat is not retried, since the next one follows.
  beat() {
    const assignments = [...this.queue.unsent, ...this.tasks].map(({ assignment }) => assignment).slice(-LEASES_MAX);
    if (assignments.length) this.session.call("POST", "/api/v1/heartbeat", { assignments }).catch(() => {});
  }

  // Requests tasks until there is one. Concurrent calls return at once.
  async ask() {
    if (this.#asking) return;
    this.#asking = true;
    do {
      let ms = 0, problem = null;
      const asked = this.project;
      try {
        if (!await this.#askOnce()) ms = AGAIN_MS;
      } catch (error) {
        [ms, problem] = [error.retryMs ?? AGAIN_MS, error];
      }
      this.changed(problem, asked);
      if (ms && !this.tasks.length) await pause(ms);
    } while (!this.tasks.length);
    this.#asking = false;
  }

  async #askOnce() {
    const known = new Set([...await claims(), ...this.tasks.map(({ assignment }) => assignment)]);
    this.queue.unsent.forEach(({ assignment }) => known.add(assignment));
    const limit = Math.min(LEASES_MAX, AHEAD - this.tasks.length + known.size);
    const before = this.tasks, { project } = this;
    const { tasks } = await this.session.call("GET", `/api/tasks?limit=${limit}${project && `&project=${project}`}`);
    const listed = new Set(tasks.map(({ assignment }) => assignment));
    // Fewer tasks than the limit are all that the peer assigned. Earlier tasks that are missing have expired.
    const isOver = (task) => before.includes(task) && isOf(project, task) && !listed.has(task.assignment);
    if (tasks.length < limit) this.tasks.filter(isOver).forEach((task) => this.drop(task));
    for (const task of tasks) {
      if (this.tasks.length >= AHEAD) break;
      if (!known.has(task.assignment)) await this.take(task);
    }
    if (project !== this.project) this.#giveBack(); // Another project was chosen meanwhile.
    this.beat();
    this.isEmpty = !tasks.length && project === this.project;
    return this.tasks.length > 0;
  }

  // Adds a task, unless another tab has it or it is answered.
  async take(task, isNext = false) {
    const release = await claimed(task.assignment);
    if (!release) return;
    const answered = (await this.queue.store.answers()).some(({ assignment }) => assignment === task.assignment);
    if (answered) return release();
    this.#releases.set(task.assignment, release);
    if (isNext) this.tasks.unshift(task); else this.tasks.push(task);
  }

  // Requests tasks of this project only; empty: of all projects. `isClosed`: the earlier project is closed, and its tasks are dropped.
  choose(project, isClosed = false) {
    if (isClosed) this.tasks.filter((task) => task.project === this.project).forEach((task) => this.drop(task));
    this.project = project;
    this.isEmpty = false;
    this.#giveBack();
    this.ask();
  }

  // Releases tasks of other projects. If the request fails, the peer releases them 45 s after their last heartbeat.
  #giveBack() {
    for (const task of this.tasks.filter((other) => !isOf(this.project, other))) {
      this.drop(task);
      this.session.release(task).catch(() => {});
    }
  }

  drop(task) {
    this.tasks = this.tasks.filter((other) => other !== task);
    return this.release(task);
  }

  release({ assignment }) {
    const given = this.#releases.get(assignment)?.();
    this.#releases.delete(assignment);
    return given;
  }
}
