"""A picture for each idea of lesson 15: what it changes in blocks and tables."""

from __future__ import annotations

from minipaged.memory import BlockAllocator, BlockTable
from minipaged.viewer.pictures.ideas import HIGH, STEP, TILE, TOP
from minipaged.viewer.pictures.scenes import SIZE
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg


def radix_svg() -> Svg:
    """Three prompts as a tree of token runs: what is shared appears once; a split may be inside a block."""
    picture = Picture(640, 304, "A radix tree: edges are runs of tokens, of any length")
    runs = (
        # depth, row, words, the holder's hue
        (0, 1.0, "You are a poet .", 0),
        (1, 0.0, "Write about the sea", 1),
        (1, 2.0, "Write a", 2),
        (2, 1.5, "song", 3),
        (2, 2.5, "letter", 4),
    )
    wide, place = 44, {}
    lefts = (MARGIN, MARGIN + 5 * wide + 70, MARGIN + 5 * wide + 70 + 2 * wide + 70)
    for depth, row, text, hue in runs:
        x, y, words = lefts[depth], TOP + 16 + row * 66, text.split()
        place[text] = (x, y, x + wide * len(words))
        picture.slots(x, y, wide, HIGH, f"tint{hue}", words, size=11)
    for parent, child in ((0, 1), (0, 2), (2, 3), (2, 4)):
        _, y1, right = place[runs[parent][2]]
        x2, y2, _ = place[runs[child][2]]
        picture.arrow(right + 4, y1 + HIGH / 2, x2 - 3, y2 + HIGH / 2, runs[child][3])
    picture.text(lefts[1] + 4 * wide + 14, TOP + 38, "A: 9 tokens", "soft")
    picture.text(lefts[2] + wide + 14, TOP + 16 + 1.5 * 66 + 22, "B: 8 tokens", "soft")
    picture.text(lefts[2] + wide + 14, TOP + 16 + 2.5 * 66 + 22, "C: 8 tokens", "soft")
    picture.note("B and C share 7 tokens; with blocks of 4 a hash table shares 4 of them")
    return picture.render(
        "Prefixes in a radix tree",
        "Three prompts share the run 'You are a poet .'; two of them share 'Write a' after it. A branch may "
        "begin at any token.",
    )


def window_svg() -> Svg:
    """A table before and after its window has moved on: entries that nobody sees point to the null block."""
    pool = BlockAllocator(8, order=(0, 7, 1, 3))
    [null] = pool.allocate()
    table = BlockTable(pool, SIZE)
    table.append(11)
    window = 5
    visible = table.num_tokens + 1 - window
    slot = 34
    picture = Picture(640, 266, f"Sliding window of {window}: blocks behind it go back to the pool")
    for row, label in enumerate(("before", "after")):
        y = TOP + 24 + row * 92
        picture.text(MARGIN, y + 22, label, "soft")
        for logical, block in enumerate(table.blocks):
            x = MARGIN + 76 + logical * (SIZE * slot + 14)
            gone = (logical + 1) * SIZE <= visible
            first = logical * SIZE
            words = [str(first + i) if i < table.filled(logical) else None for i in range(SIZE)]
            if gone and row:
                picture.block(x, y, SIZE * slot, HIGH, "free")
                picture.text(x + SIZE * slot / 2, y + 22, "nobody looks", "soft", 12, "middle")
            else:
                picture.slots(x, y, slot, HIGH, "shade" if gone else f"tint{logical}", words)
            entry = f"table[{logical}] = " + (f"null ({null})" if gone and row else str(block))
            picture.text(x + SIZE * slot / 2, y + HIGH + 18, entry, "ink mono", 12.5, "middle")
    x = MARGIN + 76 + (visible // SIZE) * (SIZE * slot + 14) + (visible % SIZE) * slot
    end = MARGIN + 76 + 2 * (SIZE * slot + 14) + 4 * slot
    picture.line(x, TOP + 14, end, TOP + 14, "edge1", 3)
    label = f"positions that token {table.num_tokens} sees: {visible} to {table.num_tokens}"
    picture.text((x + end) / 2, TOP + 6, label, "soft", 12.5, "middle")
    picture.note("the table keeps its length: position // 4 still finds the block")
    return picture.render(
        "A sliding window in a block table",
        f"With a window of {window}, token 11 sees positions {visible} to 11. The first block goes back "
        "to the pool and its entry points to the null block.",
    )


def latent_svg() -> Svg:
    """KV values of a token in a layer: all heads, groups of heads, one, a latent vector."""
    heads, dim, groups, latent = 128, 128, 8, 512 + 64
    rows = (
        (f"MHA, {heads} heads", 2 * heads * dim),
        (f"GQA, {groups} groups", 2 * groups * dim),
        ("MLA, 512 + 64", latent),
        ("MQA, 1 head", 2 * dim),
    )
    picture = Picture(820, 254, "What a token leaves in the cache, per layer (DeepSeek-V2's sizes)")
    full = picture.width - 2 * MARGIN - 150 - 170
    for i, (name, values) in enumerate(rows):
        y = TOP + 6 + i * 42
        picture.text(MARGIN, y + 20, name)
        width = max(2.0, full * values / rows[0][1])
        picture.rect(MARGIN + 150, y, width, 28, f"tint{i}", 2)
        label = f"{values:,} values, {100 * values / rows[0][1]:.1f} %"
        picture.text(MARGIN + 150 + width + 10, y + 20, label, "soft")
    picture.note("a block of 16 tokens has another width; tables, scheduler and allocator stay as they are")
    words = "; ".join(f"{name}: {values:,} values" for name, values in rows)
    return picture.render("Values that a token leaves in the cache", f"{words}.")


def states_svg() -> Svg:
    """What two kinds of layers keep of a sequence after 5 and after 11 tokens."""
    table = BlockTable(BlockAllocator(8, order=(7, 1, 3)), SIZE)
    slot, wide = 34, 118
    picture = Picture(760, 262, "An attention layer keeps every token, a recurrent layer one state")
    x_state = picture.width - MARGIN - wide
    picture.text(MARGIN + 92, TOP + 6, "attention: keys and values in blocks", "soft", 12.5)
    picture.text(x_state, TOP + 6, "recurrent", "soft", 12.5)
    for row, num_tokens in enumerate((5, 11)):
        y = TOP + 20 + row * 88
        table.append(num_tokens - table.num_tokens)
        picture.text(MARGIN, y + 22, f"{num_tokens} tokens", bold=True)
        for logical, block in enumerate(table.blocks):
            x, filled = MARGIN + 92 + logical * (SIZE * slot + 12), table.filled(logical)
            words = [str(logical * SIZE + i) if i < filled else None for i in range(SIZE)]
            picture.slots(x, y, slot, HIGH, f"tint{logical}", words)
            picture.text(x, y + HIGH + 18, f"block {block}", "ink mono", 12)
        picture.rect(x_state, y, wide, HIGH, "tint3")
        picture.text(x_state + wide / 2, y + 22, f"state of 0 to {num_tokens - 1}", "ink", 12.5, "middle")
    picture.line(x_state + wide / 2, TOP + 60, x_state + wide / 2, TOP + 100, "edge3", 1.8)
    picture.text(x_state + wide / 2 - 8, TOP + 84, "replaced", "soft", 12.5, "end")
    picture.note("a fork copies the state; the one before it is gone, unless somebody kept it")
    return picture.render(
        "Blocks and a state",
        "After 5 tokens an attention layer holds 2 blocks, after 11 tokens 3. A recurrent layer holds one "
        "state of the same size, which stands for all tokens so far.",
    )


def quantised_svg() -> Svg:
    """The blocks that fit into one memory with keys and values of 16, 8 and 4 bits."""
    picture = Picture(820, 248, "Fewer bits, more blocks in the same memory")
    size, dim = 16, 128
    whole = 2 * size * dim * 16  # bits of K and V of a block, per head
    memory, counts = 8 * whole, []
    full = picture.width - 2 * MARGIN - 92
    for row, bits in enumerate((16, 8, 4)):
        scales = 0 if bits == 16 else 2 * size * 16  # one 16-bit scale per token, K and V
        block = 2 * size * dim * bits + scales
        count = memory // block
        y = TOP + 8 + row * 52
        picture.text(MARGIN, y + 22, f"{bits} bits")
        for i in range(count):
            wide = full * block / memory
            x = MARGIN + 68 + i * wide
            picture.rect(x + 1, y, wide - 2, HIGH, f"tint{row}", 2)
            if scales:
                share = max(2.0, wide * scales / block)
                picture.rect(x + wide - share - 1, y, share, HIGH, "tint5", 1)
        counts.append(f"{count} blocks of {bits} bits")
        picture.text(picture.width - MARGIN, y + 22, str(count), "ink", 15, "end", bold=True)
    picture.note(
        "vermilion: the scales (here one per token, for K and for V), which live and move with the block"
    )
    return picture.render("Quantised blocks", f"In the same memory: {', '.join(counts)}.")


def tiers_svg() -> Svg:
    """Device, host and disk: the same hash names a block in each."""
    picture = Picture(820, 300, "Tiers: the same name, another place")
    tiers = (
        ("GPU", "tens of GB", 5),
        ("host memory", "hundreds of GB", 8),
        ("disk, other hosts", "terabytes", 11),
    )
    names = ("9f3a", "41c0", "d27e", "0b95", "77e1", "c3d8", "5a12", "e60b", "18ff", "b24d", "6c97")
    for row, (name, speed, count) in enumerate(tiers):
        y = TOP + 10 + row * 76
        picture.text(MARGIN, y + 16, name, bold=True)
        picture.text(MARGIN, y + 34, speed, "soft", 12)
        for i in range(count):
            x = MARGIN + 166 + i * STEP
            held = row == 0 and i < 3
            picture.block(x, y, TILE, HIGH, "used" if held else "evictable", "tint0")
            picture.rect(x + 5, y + 7, TILE - 10, 20, "paper", 6)
            picture.text(x + TILE / 2, y + 21, names[(i + 2 * row) % len(names)], "ink mono", 11.5, "middle")
        if row:
            middle = MARGIN + 166 + 3 * STEP + TILE / 2
            picture.line(middle, y - 38, middle, y - 8, "edge1", 1.8)
            picture.text(middle + 8, y - 18, "evicted: moved down, found again: moved up", "soft", 12)
    picture.note("blue: held by a table; hatched: kept for its content")
    return picture.render(
        "Tiers of a prefix cache",
        "Blocks that the GPU evicts move to host memory, then to disk; a hash finds them in any tier.",
    )


def disaggregated_svg() -> Svg:
    """Prompts on one engine, decodes on another, blocks in between."""
    picture = Picture(820, 276, "Prefill here, decode there: the blocks travel")
    sides = (
        ("prefill engine", "computes prompts, keeps nothing", BlockAllocator(6, order=(4, 1, 5))),
        ("decode engine", "large batches, no prompt in the way", BlockAllocator(9, order=(2, 7, 0, 8))),
    )
    tables = []
    for side, (name, role, pool) in enumerate(sides):
        table = BlockTable(pool, SIZE)
        table.append(11)
        tables.append(table)
        x0 = MARGIN + side * 440
        picture.rect(x0, TOP - 2, 344, 186, "free", 8)
        picture.text(x0 + 14, TOP + 22, name, bold=True)
        picture.text(x0 + 14, TOP + 42, role, "soft", 12.5)
        picture.text(x0 + 14, TOP + 74, f"table {table.blocks}", "ink mono", 13)
        for block in range(pool.num_blocks):
            x = x0 + 14 + block * 36
            used = block in table.blocks
            look = f"tint{table.blocks.index(block)}" if used else "free"
            picture.block(x, TOP + 96, 32, 40, "used" if used else "free", look)
            picture.text(x + 16, TOP + 121, str(block), "ink" if used else "soft", 13, "middle")
        picture.text(x0 + 14, TOP + 164, "pool", "soft", 12.5)
    for logical in range(3):
        y = TOP + 100 + logical * 14
        picture.arrow(MARGIN + 350, y, MARGIN + 434, y, logical)
    picture.text(MARGIN + 392, TOP + 90, "3 blocks", "soft", 12.5, "middle")
    picture.note("the ids differ, the logical order does not: copy block by block, then fill in a new table")
    return picture.render(
        "Disaggregated prefill",
        f"The prefill engine fills blocks {tables[0].blocks}; the decode engine receives them in blocks "
        f"{tables[1].blocks}.",
    )


def draft_svg() -> Svg:
    """Four draft tokens in the table, then those that the model has accepted."""
    words = ["Once", "upon", "a", "time", ",", "there"]
    drafted, chosen = ["was", "a", "small", "dog"], "little"
    table = BlockTable(BlockAllocator(8, order=(7, 1, 3)), SIZE)
    table.append(len(words) + len(drafted))
    picture = Picture(760, 266, "Draft tokens get slots like any others; rejected ones give them back")
    slot = 52
    for row, label in enumerate(("drafted", "verified")):
        y = TOP + 14 + row * 96
        picture.text(MARGIN, y + 22, label, "soft")
        if row:
            table.truncate(len(words) + 2)
        text = [*words, *(drafted[:2] if row else drafted)]
        for logical, block in enumerate(table.blocks):
            x, first = MARGIN + 76 + logical * (SIZE * slot + 12), logical * SIZE
            piece: list[str | None] = [*text[first : first + SIZE]]
            piece += [None] * (SIZE - len(piece))
            done = SIZE if row else max(0, len(words) - first)
            picture.slots(x, y, slot, HIGH, f"tint{logical}", piece, num_computed=done, size=11)
            picture.text(x, y + HIGH + 18, f"block {block}", "ink mono", 12)
    y = TOP + 14 + 96
    x = MARGIN + 76 + 2 * (SIZE * slot + 12)
    picture.text(x, y + 14, "next, from the model:", "soft", 12.5)
    picture.text(x, y + 33, chosen, "ink mono", 14, bold=True)
    picture.note("hatched: draft tokens; one step computes all of them, and the model's choice after each")
    return picture.render(
        "Speculative decoding in a block table",
        f"The model accepts two of the draft tokens {', '.join(drafted)} and chooses '{chosen}' in place "
        "of the third; the last block is freed.",
    )
