// The pocket model in plain JavaScript: a Llama of 4 layers, float32, attention through a block table.
//
// Keys and values lie in a pool of blocks, as in the Python engine: [num_blocks, Hkv, block_size, D] a layer. Which
// block is whose, the scheduler says; here a table only translates a position into a place.

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

// out[o] += weight[o] . x, four sums at a time.
function multiply(weight, x, out, add = false) {
  const size = x.length;
  for (let o = 0, at = 0; o < out.length; o++) {
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0; i < size; i += 4, at += 4) {
      a += weight[at] * x[i];
      b += weight[at + 1] * x[i + 1];
      c += weight[at + 2] * x[i + 2];
      d += weight[at + 3] * x[i + 3];
    }
    out[o] = (add ? out[o] : 0) + (a + b + (c + d));
  }
}

function norm(x, weight, epsilon, out) {
  let squares = 0;
  for (const value of x) squares += value * value;
  const factor = 1 / Math.sqrt(squares / x.length + epsilon);
  for (let i = 0; i < x.length; i++) out[i] = x[i] * factor * weight[i];
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
    const floats = (size) => new Float32Array(size);
    this.work = {
      x: floats(hidden), normed: floats(hidden), query: floats(this.heads * dim), key: floats(this.kvHeads * dim),
      value: floats(this.kvHeads * dim), mixed: floats(this.heads * dim), gate: floats(inner), up: floats(inner),
      logits: floats(config.vocab_size), scores: floats(config.max_position_embeddings),
    };
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
    const answers = [];
    for (const { tokens, start, table, candidates, temperature } of rows) {
      tokens.forEach((token, i) => this.forward(token, start + i, table));
      if (candidates) answers.push(this.sample(candidates, temperature));
    }
    return answers;
  }

  // All reads happen before all writes.
  move(source, destination, moves) {
    const size = this.blockFloats;
    const blocks = moves.map(([from]) => source.slice(from * size, (from + 1) * size));
    moves.forEach(([, to], i) => destination.set(blocks[i], to * size));
  }

  // One token through all layers; its hidden state stays in work.x.
  forward(token, position, table) {
    const { config, work, blockSize } = this;
    const { hidden_size: hidden, head_dim: dim, rms_norm_eps: epsilon } = config;
    const { x, normed, query, key, value, mixed, gate, up } = work;
    x.set(this.embedding.subarray(token * hidden, (token + 1) * hidden));
    for (const layer of this.layers) {
      norm(x, layer.inputNorm, epsilon, normed);
      multiply(layer.query, normed, query);
      multiply(layer.key, normed, key);
      multiply(layer.value, normed, value);
      this.rotate(query, position);
      this.rotate(key, position);
      const [keys, values] = layer.device;
      const place = table[Math.floor(position / blockSize)] * this.blockFloats + (position % blockSize) * dim;
      for (let head = 0; head < this.kvHeads; head++) {
        keys.set(key.subarray(head * dim, (head + 1) * dim), place + head * blockSize * dim);
        values.set(value.subarray(head * dim, (head + 1) * dim), place + head * blockSize * dim);
      }
      this.attend(keys, values, position, table);
      multiply(layer.output, mixed, x, true);
      norm(x, layer.outputNorm, epsilon, normed);
      multiply(layer.gate, normed, gate);
      multiply(layer.up, normed, up);
      for (let i = 0; i < gate.length; i++) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
      multiply(layer.down, gate, x, true);
    }
  }

  // Element i of a head turns with element i + D/2.
  rotate(rows, position) {
    const half = this.frequencies.length;
    for (let at = 0; at < rows.length; at += 2 * half)
      for (let i = 0; i < half; i++) {
        const angle = position * this.frequencies[i], cos = Math.cos(angle), sin = Math.sin(angle);
        const a = rows[at + i], b = rows[at + half + i];
        rows[at + i] = a * cos - b * sin;
        rows[at + half + i] = b * cos + a * sin;
      }
  }

  attend(keys, values, position, table) {
    const { blockSize, work: { query, mixed, scores } } = this;
    const dim = this.config.head_dim, group = this.heads / this.kvHeads, scale = dim ** -0.5;
    mixed.fill(0);
    for (let head = 0; head < this.heads; head++) {
      const inBlock = Math.floor(head / group) * blockSize * dim, q = head * dim;
      const placeOf = (token) => table[Math.floor(token / blockSize)] * this.blockFloats + inBlock + (token % blockSize) * dim;
      let top = -Infinity;
      for (let token = 0; token <= position; token++) {
        const place = placeOf(token);
        let score = 0;
        for (let i = 0; i < dim; i++) score += query[q + i] * keys[place + i];
        scores[token] = score * scale;
        if (scores[token] > top) top = scores[token];
      }
      let sum = 0;
      for (let token = 0; token <= position; token++) sum += scores[token] = Math.exp(scores[token] - top);
      for (let token = 0; token <= position; token++) {
        const place = placeOf(token), weight = scores[token] / sum;
        for (let i = 0; i < dim; i++) mixed[q + i] += weight * values[place + i];
      }
    }
  }

  // The likeliest tokens, or draws (Gumbel's trick) at a temperature above 0.
  sample(candidates, temperature) {
    const { x, normed, logits } = this.work;
    norm(x, this.finalNorm, this.config.rms_norm_eps, normed);
    multiply(this.embedding, normed, logits);
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
