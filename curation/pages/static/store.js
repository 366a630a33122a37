// What this browser keeps of one network: who annotates here, and answers. All its tabs share it.

let person;
export const known = (chainId) => (person ??= Store.open(chainId).then((store) => store.me()).catch(() => null));

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export const PERSON = "folkmoot person"; // the channel that tells of another one

export class Store {
  by = ""; // whose answers these are, by key

  static async open(chainId) {
    const request = indexedDB.open(`folkmoot ${chainId}`, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("me");
      request.result.createObjectStore("answers", { keyPath: "assignment" }).createIndex("at", "at");
    };
    return new Store(await result(request));
  }

  constructor(database) { this.database = database; }

  // Does the work in one transaction, which other tabs see whole or not at all.
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
    new BroadcastChannel(PERSON).postMessage(""); // pages that show another person begin anew
  }

  // Of the person `by`, the oldest first.
  answers() { return this.#within("answers", "readonly", this.#rows); }

  // `change` gets these rows, and gives those to put and assignments to delete; `added` fails where there is such a row.
  change(change, added) {
    return this.#within("answers", "readwrite", async (answers) => {
      const { put = [], gone = [] } = change(await this.#rows(answers));
      if (added) answers.add({ ...added, by: this.by });
      put.forEach((row) => answers.put(row));
      gone.forEach((assignment) => answers.delete(assignment));
    });
  }
}
