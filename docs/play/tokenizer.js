// Byte-level BPE from a tokenizer.json: text -> token ids -> text. Digits and added tokens stand
// alone; the first token is <|begin|>.

// Bytes as printable letters, as GPT-2 writes them: what is printable is itself, the others follow 255.
const LETTERS = (() => {
  const printable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : next++));
})();
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));
// (\s would have U+FEFF, and not U+0085.)
const WORDS = /\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

export class Tokenizer {
  constructor({ model, added_tokens }) {
    this.ids = new Map(Object.entries(model.vocab));
    this.pieces = [];
    for (const [piece, id] of this.ids) this.pieces[id] = piece;
    this.special = new Map(added_tokens.map(({ id, content }) => [id, content]));
    this.added = new Map(added_tokens.map(({ id, content }) => [content, id]));
    this.begin = this.added.get("<|begin|>");
    this.marks = new RegExp(`(${[...this.added.keys()].map((content) => content.replace(/\W/g, "\\$&")).join("|")})`);
    this.ranks = new Map(model.merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
  }

  encode(text) {
    return [this.begin, ...text.split(this.marks).flatMap((part) => this.added.get(part) ?? this.encodePart(part))];
  }

  encodePart(text) {
    // A digit ends what was before it, so that no space joins it.
    const words = text.split(/(\p{N})/u).flatMap((part) => part.match(WORDS) ?? []);
    return words.flatMap((word) => this.encodeWord(word));
  }

  encodeWord(word) {
    let parts = Array.from(new TextEncoder().encode(word), (byte) => LETTERS[byte]);
    for (;;) {
      let best = Infinity, place = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`);
        if (rank < best) [best, place] = [rank, i];
      }
      if (place < 0) return parts.map((part) => this.ids.get(part));
      parts = [...parts.slice(0, place), parts[place] + parts[place + 1], ...parts.slice(place + 2)];
    }
  }

  decode(ids) {
    const bytes = ids.flatMap((id) => (this.special.has(id) ? [] : Array.from(this.pieces[id], (letter) => BYTES.get(letter))));
    // The beginning of a character that is not complete yet is kept back.
    return new TextDecoder().decode(Uint8Array.from(bytes), { stream: true });
  }

  // Of every token, for the viewer.
  texts() {
    return this.pieces.map((_, id) => this.special.get(id) ?? this.decode([id]));
  }
}
