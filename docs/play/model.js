// The pocket model in plain JavaScript: a Llama of 4 layers, attention through a block table.
//
// Keys and values lie in a pool of blocks, as in the Python engine: [num_blocks, Hkv, block_size, D] a layer. Which
// block is whose, the scheduler says; here a table only translates a position into a place. Weights, keys and values
// are float32, arithmetic is JavaScript's own, float64.

function readSafetensors(buffer) {
  const headerBytes = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headerBytes)));
  return (name) => {
    const { dtype, data_offsets: [begin, end] } = header[name];
    if (dtype !== "BF16") throw new Error(`weights of type ${dtype}; this page reads BF16`);
    const halves = new Uint16Array(buffer.slice(8 + headerBytes + begin, 8 + headerBytes + end));
    const bits = new Uint32Array(halves.length);
    for (let i = 0; i < bits.length; i++) bits[i] = halves[i] << 16; // a bfloat16 is the upper half of a float32
    return new Float32Array(bits.buffer);
  };
}

const TOGETHER = 4; // tokens, which share each weight that is read

// out[t][o] += weight[o] . x[t] for four tokens, which share each weight that is read; two outputs at a time.
function multiplyFour(weight, x, out) {
  const size = x.length / 4, outputs = out.length / 4;
  const [x1, x2, x3] = [size, 2 * size, 3 * size], [o1, o2, o3] = [outputs, 2 * outputs, 3 * outputs];
  for (let o = 0, at = 0; o < outputs; o += 2, at += 2 * size) {
    let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    for (let i = 0; i < size; i++) {
      const a = weight[at + i], b = weight[at + size + i];
      const t0 = x[i], t1 = x[x1 + i], t2 = x[x2 + i], t3 = x[x3 + i];
      a0 += a * t0; a1 += a * t1; a2 += a * t2; a3 += a * t3;
      b0 += b * t0; b1 += b * t1; b2 += b * t2; b3 += b * t3;
    }
    out[o] += a0; out[o1 + o] += a1; out[o2 + o] += a2; out[o3 + o] += a3;
    out[o + 1] += b0; out[o1 + o + 1] += b1; out[o2 + o + 1] += b2; out[o3 + o + 1] += b3;
  }
}

// out[o] += weight[o] . x for a token alone, four sums at a time.
function multiplyOne(weight, x, out) {
  const size = x.length;
  for (let o = 0, at = 0; o < out.length; o++) {
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0; i < size; i += 4, at += 4) {
      a += weight[at] * x[i];
      b += weight[at + 1] * x[i + 1];
      c += weight[at + 2] * x[i + 2];
      d += weight[at + 3] * x[i + 3];
    }
    out[o] += a + b + (c + d);
  }
}

function multiply({ tokens }, weight, x, out, add = false) {
  if (!add) out.fill(0);
  (tokens === 1 ? multiplyOne : multiplyFour)(weight, x, out);
}

function norm(x, weight, epsilon, out) {
  const size = weight.length;
  for (let at = 0; at < x.length; at += size) {
    let squares = 0;
    for (let i = 0; i < size; i++) squares += x[at + i] * x[at + i];
    const factor = 1 / Math.sqrt(squares / size + epsilon);
    for (let i = 0; i < size; i++) out[at + i] = x[at + i] * factor * weight[i];
  }
}

export class PocketModel {
  constructor(buffer, config, blockSize, numBlocks) {
    Object.assign(this, { config, blockSize });
    const read = readSafetensors(buffer);
    const { hidden_size: hidden, intermediate_size: inner, head_dim: dim } = config;
    this.heads = config.num_attention_heads;
    this.kvHeads = config.num_key_value_heads;
    this.embedding = read("model.embed_tokens.weight");
    this.finalNorm = read("model.norm.weight");
    this.blockFloats = this.kvHeads * blockSize * dim;
    this.blockBytes = 2 * config.num_hidden_layers * this.blockFloats * 4;
    const pools = () => [new Float32Array(numBlocks * this.blockFloats), new Float32Array(numBlocks * this.blockFloats)];
    this.layers = Array.from({ length: config.num_hidden_layers }, (_, number) => {
      const weight = (name) => read(`model.layers.${number}.${name}.weight`);
      return {
        inputNorm: weight("input_layernorm"), outputNorm: weight("post_attention_layernorm"),
        query: weight("self_attn.q_proj"), key: weight("self_attn.k_proj"), value: weight("self_attn.v_proj"),
        output: weight("self_attn.o_proj"),
        gate: weight("mlp.gate_proj"), up: weight("mlp.up_proj"), down: weight("mlp.down_proj"),
        device: pools(), host: pools(), // [keys, values]
      };
    });
    this.scores = new Float64Array(config.max_position_embeddings);
    const place = (tokens) => {
      const floats = (size) => new Float64Array(tokens * size);
      return {
        tokens, x: floats(hidden), normed: floats(hidden), query: floats(this.heads * dim), key: floats(this.kvHeads * dim),
        value: floats(this.kvHeads * dim), mixed: floats(this.heads * dim), gate: floats(inner), up: floats(inner),
        logits: floats(config.vocab_size), cos: floats(dim / 2), sin: floats(dim / 2),
      };
    };
    [this.one, this.four] = [place(1), place(TOGETHER)];
    const theta = config.rope_parameters.rope_theta;
    this.frequencies = Float32Array.from({ length: dim / 2 }, (_, i) => theta ** ((-2 * i) / dim));
  }

  // A step as minipaged/playground/pocket.py sends it -> [[tokens, log-probabilities], ...].
  step({ swap_out, swap_in, copies, rows }) {
    for (const { device, host } of this.layers)
      for (const side of [0, 1]) {
        this.move(device[side], host[side], swap_out);
        this.move(host[side], device[side], swap_in);
        this.move(device[side], device[side], copies);
      }
    const all = rows.flatMap(({ tokens, start, table, candidates, temperature }) =>
      tokens.map((token, i) => ({ token, position: start + i, table, temperature, candidates: i === tokens.length - 1 ? candidates : 0 })));
    const answers = [];
    for (let at = 0; at < all.length; at += TOGETHER) {
      const some = all.slice(at, at + TOGETHER);
      const work = some.length === 1 ? this.one : this.four;
      this.forward(work, some);
      if (some.some(({ candidates }) => candidates)) {
        norm(work.x, this.finalNorm, this.config.rms_norm_eps, work.normed);
        multiply(work, this.embedding, work.normed, work.logits);
        some.forEach((each, t) => each.candidates && answers.push(this.sample(work, t, each)));
      }
    }
    return answers;
  }

  // All reads happen before all writes.
  move(source, destination, moves) {
    const size = this.blockFloats;
    const blocks = moves.map(([from]) => source.slice(from * size, (from + 1) * size));
    moves.forEach(([, to], i) => destination.set(blocks[i], to * size));
  }

  // Up to four tokens through all layers; their hidden states stay in work.x. Keys of all are written before one attends.
  forward(work, some) {
    const { config, blockSize, frequencies } = this;
    const { hidden_size: hidden, head_dim: dim, rms_norm_eps: epsilon } = config;
    const { x, normed, query, key, value, mixed, gate, up, cos, sin } = work;
    const half = frequencies.length, width = this.kvHeads * dim;
    x.fill(0);
    some.forEach(({ token, position }, t) => {
      x.set(this.embedding.subarray(token * hidden, (token + 1) * hidden), t * hidden);
      for (let i = 0; i < half; i++) {
        cos[t * half + i] = Math.cos(position * frequencies[i]);
        sin[t * half + i] = Math.sin(position * frequencies[i]);
      }
    });
    for (const layer of this.layers) {
      norm(x, layer.inputNorm, epsilon, normed);
      multiply(work, layer.query, normed, query);
      multiply(work, layer.key, normed, key);
      multiply(work, layer.value, normed, value);
      this.rotate(work, query);
      this.rotate(work, key);
      const [keys, values] = layer.device;
      some.forEach(({ position, table }, t) => {
        const place = table[Math.floor(position / blockSize)] * this.blockFloats + (position % blockSize) * dim;
        for (let head = 0; head < this.kvHeads; head++) {
          const from = t * width + head * dim, to = place + head * blockSize * dim;
          keys.set(key.subarray(from, from + dim), to);
          values.set(value.subarray(from, from + dim), to);
        }
      });
      mixed.fill(0);
      some.forEach(({ position, table }, t) => this.attend(work, t, keys, values, position, table));
      multiply(work, layer.output, mixed, x, true);
      norm(x, layer.outputNorm, epsilon, normed);
      multiply(work, layer.gate, normed, gate);
      multiply(work, layer.up, normed, up);
      for (let i = 0; i < gate.length; i++) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
      multiply(work, layer.down, gate, x, true);
    }
  }

  // Element i of a head turns with element i + D/2.
  rotate({ tokens, cos, sin }, heads) {
    const half = this.frequencies.length, size = heads.length / tokens;
    for (let at = 0; at < heads.length; at += 2 * half) {
      const turn = Math.floor(at / size) * half;
      for (let i = 0; i < half; i++) {
        const a = heads[at + i], b = heads[at + half + i], c = cos[turn + i], s = sin[turn + i];
        heads[at + i] = a * c - b * s;
        heads[at + half + i] = b * c + a * s;
      }
    }
  }

  // The token in place t over all that are before it and itself, block by block.
  attend({ query, mixed }, t, keys, values, position, table) {
    const { blockSize, blockFloats, heads, scores } = this;
    const dim = this.config.head_dim, group = heads / this.kvHeads, scale = dim ** -0.5;
    for (let head = 0; head < heads; head++) {
      const inBlock = Math.floor(head / group) * blockSize * dim, q = (t * heads + head) * dim;
      let top = -Infinity;
      for (let token = 0, block = 0; token <= position; block++) {
        let place = table[block] * blockFloats + inBlock;
        for (const end = Math.min(token + blockSize, position + 1); token < end; token++, place += dim) {
          let score = 0;
          for (let i = 0; i < dim; i++) score += query[q + i] * keys[place + i];
          scores[token] = score * scale;
          if (scores[token] > top) top = scores[token];
        }
      }
      let sum = 0;
      for (let token = 0; token <= position; token++) sum += scores[token] = Math.exp(scores[token] - top);
      for (let token = 0, block = 0; token <= position; block++) {
        let place = table[block] * blockFloats + inBlock;
        for (const end = Math.min(token + blockSize, position + 1); token < end; token++, place += dim) {
          const weight = scores[token] / sum;
          for (let i = 0; i < dim; i++) mixed[q + i] += weight * values[place + i];
        }
      }
    }
  }

  // The likeliest tokens, or draws (Gumbel's trick) at a temperature above 0.
  sample(work, t, { candidates, temperature }) {
    const logits = work.logits.subarray(t * this.config.vocab_size, (t + 1) * this.config.vocab_size);
    const top = logits.reduce((a, b) => Math.max(a, b));
    const logSum = top + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - top), 0));
    const tokens = [];
    for (let i = 0; i < candidates; i++) {
      let best = -1, most = -Infinity;
      for (let token = 0; token < logits.length; token++) {
        if (!temperature && tokens.includes(token)) continue;
        const value = temperature ? logits[token] / temperature - Math.log(-Math.log(Math.random())) : logits[token];
        if (value > most) [best, most] = [token, value];
      }
      tokens.push(best);
    }
    return [tokens, tokens.map((token) => logits[token] - logSum)];
  }
}
