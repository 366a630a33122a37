// A key's backup as a file that a passphrase opens. PBKDF2 makes each guess slow, and AES-GCM detects a wrong passphrase. WebCrypto
// wraps and unwraps the key, so no script sees its bytes.
import { hex, unhex, utf8 } from "/static/wire.js";

const VERSION = 1;
const HASH = "SHA-256";
const ITERATIONS = 600_000;
const ITERATIONS_MAX = 10_000_000; // bounds the time that a foreign file can cost

const random = (size) => crypto.getRandomValues(new Uint8Array(size));

async function wrapping(passphrase, { iterations, salt }) {
  const typed = await crypto.subtle.importKey("raw", utf8(passphrase.normalize("NFKC")), "PBKDF2", false, ["deriveKey"]);
  const kdf = { name: "PBKDF2", hash: HASH, iterations, salt: unhex(salt) };
  return crypto.subtle.deriveKey(kdf, typed, { name: "AES-GCM", length: 256 }, false, ["wrapKey", "unwrapKey"]);
}

// The fields beside the ciphertext are authenticated, too.
const cipher = ({ version, name, public_key, iv }) => (
  { name: "AES-GCM", iv: unhex(iv), additionalData: utf8(JSON.stringify([version, name, public_key])) });

// Returns a backup. `me.secret` must be a key that can be exported.
export async function backup(me, passphrase) {
  const kdf = { name: "PBKDF2", hash: HASH, iterations: ITERATIONS, salt: hex(random(16)) };
  const file = { version: VERSION, name: me.name, public_key: hex(me.publicKey), kdf, cipher: "AES-256-GCM", iv: hex(random(12)) };
  const ciphertext = await crypto.subtle.wrapKey("pkcs8", me.secret, await wrapping(passphrase, kdf), cipher(file));
  return { ...file, ciphertext: hex(new Uint8Array(ciphertext)) };
}

// Returns the annotator of a backup, with a secret that cannot be exported. Throws an error that names the mistake.
export async function opened(file, passphrase) {
  const texts = [file?.name, file?.public_key, file?.iv, file?.ciphertext, file?.kdf?.salt], iterations = file?.kdf?.iterations;
  const isBackup = file?.version === VERSION && texts.every((text) => typeof text === "string") && iterations >= ITERATIONS;
  if (!isBackup || iterations > ITERATIONS_MAX) throw new Error("This file is not a key backup.");
  const key = await wrapping(passphrase, file.kdf);
  const secret = await crypto.subtle.unwrapKey("pkcs8", unhex(file.ciphertext), key, cipher(file), "Ed25519", false, ["sign"])
    .catch(() => { throw new Error("Wrong passphrase, or the backup file is damaged."); });
  return { name: file.name, publicKey: unhex(file.public_key), secret };
}
