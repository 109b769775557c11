/**
 * Incremental SHA-256. The browser's own needs the whole file in memory, and is missing on pages without TLS; a list
 * may have gigabytes.
 */

const K = new Uint32Array(64);
const START = new Uint32Array(8);

/** The constants of the standard: fractional parts of roots of primes. */
function constants() {
  const fraction = (/** @type {number} */ root) => (root - Math.floor(root)) * 2 ** 32;
  for (let number = 2, found = 0; found < 64; number += 1) {
    let prime = true;
    for (let factor = 2; factor * factor <= number; factor += 1) if (number % factor === 0) prime = false;
    if (!prime) continue;
    if (found < 8) START[found] = fraction(Math.sqrt(number));
    K[found] = fraction(Math.cbrt(number));
    found += 1;
  }
}
constants();

export class Sha256 {
  #state = START.slice();
  #words = new Uint32Array(64);
  #rest = new Uint8Array(64);
  #held = 0;
  #length = 0;

  /** @param {Uint8Array} data */
  update(data) {
    this.#length += data.length;
    let at = 0;
    if (this.#held) {
      at = Math.min(64 - this.#held, data.length);
      this.#rest.set(data.subarray(0, at), this.#held);
      this.#held += at;
      if (this.#held < 64) return this;
      this.#block(this.#rest, 0);
    }
    for (; at + 64 <= data.length; at += 64) this.#block(data, at);
    this.#rest.set(data.subarray(at));
    this.#held = data.length - at;
    return this;
  }

  /** The digest, in hexadecimal. Nothing can be added after it. */
  hex() {
    const length = this.#length;
    const padding = new Uint8Array(((this.#held < 56 ? 56 : 120) - this.#held) + 8);
    padding[0] = 0x80;
    const view = new DataView(padding.buffer);
    view.setUint32(padding.length - 8, Math.floor(length / 2 ** 29));
    view.setUint32(padding.length - 4, (length << 3) >>> 0);
    this.update(padding);
    return [...this.#state].map((word) => word.toString(16).padStart(8, "0")).join("");
  }

  /** @param {Uint8Array} data @param {number} at */
  #block(data, at) {
    const w = this.#words;
    for (let i = 0; i < 16; i += 1) {
      const p = at + 4 * i;
      w[i] = (data[p] << 24) | (data[p + 1] << 16) | (data[p + 2] << 8) | data[p + 3];
    }
    for (let i = 16; i < 64; i += 1) {
      const [a, b] = [w[i - 15], w[i - 2]];
      const s0 = ((a >>> 7) | (a << 25)) ^ ((a >>> 18) | (a << 14)) ^ (a >>> 3);
      const s1 = ((b >>> 17) | (b << 15)) ^ ((b >>> 19) | (b << 13)) ^ (b >>> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    let [a, b, c, d, e, f, g, h] = this.#state;
    for (let i = 0; i < 64; i += 1) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + t1) | 0;
      d = c;
      c = b;
      b = a;
      a = (t1 + t2) | 0;
    }
    const s = this.#state;
    s[0] += a;
    s[1] += b;
    s[2] += c;
    s[3] += d;
    s[4] += e;
    s[5] += f;
    s[6] += g;
    s[7] += h;
  }
}
