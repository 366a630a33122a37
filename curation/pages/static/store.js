// Data of one network in this browser: the annotator and the answers. All tabs share it.

let person;
export const known = (chainId) => (person ??= Store.open(chainId).then((store) => store.me()).catch(() => null));

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export const PERSON = "folkmoot person"; // the channel that announces another annotator

export class Store {
  by = ""; // key of the annotator whose answers are read and written

  static async open(chainId) {
    const request = indexedDB.open(`folkmoot ${chainId}`, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("me");
      request.result.createObjectStore("answers", { keyPath: "assignment" }).createIndex("at", "at");
    };
    return new Store(await result(request));
  }

  constructor(database) { this.database = database; }

  // Runs `work` in one transaction. Other tabs see all of its changes or none.
  async #within(name, mode, work) {
    const transaction = this.database.transaction(name, mode, { durability: "strict" });
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    const found = await Promise.all([work(transaction.objectStore(name)), done]);
    return found[0];
  }

  #rows = (answers) => result(answers.index("at").getAll()).then((rows) => rows.filter(({ by }) => by === this.by));

  me() { return this.#within("me", "readonly", (me) => result(me.get(0))); }

  async setMe(person) {
    await this.#within("me", "readwrite", (me) => result(person ? me.put(person, 0) : me.delete(0)));
    new BroadcastChannel(PERSON).postMessage(""); // tabs that show another annotator reload
  }

  // Answers of the annotator `by`, oldest first.
  answers() { return this.#within("answers", "readonly", this.#rows); }

  // Changes rows. `change` gets all rows and returns rows to put and assignments to delete. Adding `added` fails if its assignment has a row.
  change(change, added) {
    return this.#within("answers", "readwrite", async (answers) => {
      const { put = [], gone = [] } = change(await this.#rows(answers));
      if (added) answers.add({ ...added, by: this.by });
      put.forEach((row) => answers.put(row));
      gone.forEach((assignment) => answers.delete(assignment));
    });
  }
}
