"""One picture for the idea of each lesson, drawn from the results of the real classes."""

from __future__ import annotations

import copy
import zlib
from array import array
from collections.abc import Sequence
from textwrap import wrap

from minipaged.memory import BlockAllocator, BlockTable, CachedBlock, PrefixCache
from minipaged.viewer.pictures.scenes import SCORE, SIZE
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg, in_both_forms, text_width
from minipaged.viewer.snapshot import PoolView

TOP = MARGIN + 40  # below the caption
TILE, HIGH = 52, 34
STEP = TILE + 4  # from one tile to the next


def free_list_svg() -> Svg:
    """Lesson 02: blocks with their reference counts, and the free list as a stack."""
    pool = BlockAllocator(8, order=(7, 1, 3))
    blocks = pool.allocate(3)
    moments = [(f"allocate(3) gives {', '.join(map(str, blocks))}", copy.deepcopy(pool))]
    pool.share(blocks[1])
    moments.append((f"share({blocks[1]}): a second table holds it", copy.deepcopy(pool)))
    for block in blocks[:2]:
        pool.free(block)
    moments.append(
        (f"free({blocks[0]}), free({blocks[1]}): one of them has a holder left", copy.deepcopy(pool))
    )
    row = 104
    picture = Picture(820, TOP + len(moments) * row + 6, "Reference counts, and a free list that is a stack")
    for i, (call, state) in enumerate(moments):
        y = TOP + i * row
        picture.text(MARGIN, y + 4, call, "ink mono", 13)
        for block in range(state.num_blocks):
            count, x = state.ref_count(block), MARGIN + block * STEP
            hue = 0 if count == 1 else 1
            picture.block(x, y + 14, TILE, HIGH, "used" if count else "free", f"tint{hue}")
            picture.text(x + 7, y + 36, str(block), "ink" if count else "soft", 14, bold=bool(count))
            if count:
                picture.text(x + TILE - 6, y + 36, f"\u00d7{count}", "ink", 12, "end")
        x = MARGIN + state.num_blocks * STEP + 34
        order = copy.deepcopy(state).allocate(state.num_free)  # what it would hand out, the next first
        picture.text(x, y + 4, "free list, next first", "soft", 12.5)
        for place, block in enumerate(order):
            picture.rect(x + place * 34, y + 14, 30, HIGH, "free")
            picture.text(x + place * 34 + 15, y + 36, str(block), "ink", 14, "middle", bold=place == 0)
    words = ". ".join(call for call, _ in moments)
    return picture.render(
        "Reference counts and the free list", f"{words}. The block freed last is handed out next."
    )


def gather_svg() -> Svg:
    """Lesson 03: keys in scattered blocks are gathered through the table; the rest is attention."""
    table = BlockTable(BlockAllocator(9, order=(7, 1, 3)), SIZE)
    table.append(len(SCORE))
    slot, gap = 19, 8
    wide = SIZE * slot
    picture = Picture(2 * MARGIN + 9 * (wide + gap) - gap, 322, "Gather through the block table, then attend")
    y_pool, y_row = TOP + 30, 236
    picture.text(MARGIN, y_pool - 10, "key pool: physical blocks 0 to 8, 4 slots each", "soft")
    for block in range(9):
        x = MARGIN + block * (wide + gap)
        picture.block(x, y_pool, wide, HIGH, "free")
        picture.text(x + wide / 2, y_pool + HIGH + 16, str(block), "soft", 12.5, "middle")
    start = (picture.width - len(SCORE) * 52) / 2
    for logical, block in enumerate(table.blocks):
        x, filled = MARGIN + block * (wide + gap), table.filled(logical)
        letters = [word[:2] for word in SCORE[logical * SIZE :][:filled]]
        picture.slots(x, y_pool, slot, HIGH, f"tint{logical}", [*letters, *[None] * (SIZE - filled)], size=11)
        left = start + logical * SIZE * 52
        ends = (x + filled * slot / 2, y_pool + HIGH + 22, left + filled * 26, y_row - 6)
        picture.line(*ends, f"edge{logical}", 2)
        picture.slots(left, y_row, 52, HIGH, f"tint{logical}", SCORE[logical * SIZE :][:filled], size=11)
        entry = f"table[{logical}] = {block}"
        picture.text(left + filled * 26, y_row + HIGH + 18, entry, "ink mono", 12.5, "middle")
    picture.note("block = table[position // 4], offset = position % 4; slots past the context are never read")
    words = f"The {len(SCORE)} keys of a sequence lie in physical blocks {', '.join(map(str, table.blocks))}"
    return picture.render("Gather through a block table", f"{words}; gathered, they are contiguous.")


def chain_svg() -> Svg:
    """Lesson 08: two prompts with a common beginning, their hash chains, and who is evicted first."""
    cache = PrefixCache(BlockAllocator(6), SIZE, hash_function=lambda key: zlib.crc32(repr(key).encode()))
    common = ["You", "are", "a", "poet", ".", "Write", "about", "the"]
    prompts = [
        ("A", [*common, "sea", "and", "its", "ships"]),
        ("B", [*common, "moon", "and", "its", "light"]),
    ]
    names: list[str] = []
    picture = Picture(760, TOP + 286, "A hash names a block and all before it")
    held = []
    for row, (who, words) in enumerate(prompts):
        names += [word for word in words if word not in names]
        tokens, hashes = array("i", map(names.index, words)), list[int]()
        cache.extend_hashes(hashes, tokens)
        found = cache.match(hashes, tokens)
        for block in found:
            cache.share(block)
        blocks = [*found, *cache.allocate(len(hashes) - len(found))]
        y = TOP + 12 + row * 104
        picture.text(MARGIN, y + 28, who, size=15, bold=True)
        entry: CachedBlock | str = ""
        for i, (block, chain_hash) in enumerate(zip(blocks, hashes)):
            x, hit = MARGIN + 34 + i * 236, i < len(found)
            hue = 0 if hit or not row else 1
            picture.slots(x, y, 50, HIGH, f"tint{hue}", words[i * SIZE :][:SIZE], size=11)
            entry_text = f"{chain_hash:08x} \u2192 block {block}"
            picture.text(x, y + HIGH + 18, entry_text, "ink mono", 12)
            picture.text(x, y + HIGH + 35, "hit: shared" if hit else "computed", "soft", 12.5, bold=hit)
            if i:
                picture.arrow(x - 34, y + HIGH / 2, x - 3, y + HIGH / 2, hue)
            piece = tokens[i * SIZE : (i + 1) * SIZE]
            entry = cache.entry_of(block) or cache.register(block, chain_hash, piece, entry)
        held.append(blocks)
    for blocks in held:
        for block in reversed(blocks):
            cache.free(block)
    y = TOP + 226
    picture.text(MARGIN, y, "both have ended; evicted first \u2192 last:", "soft", 12.5)
    for i, block in enumerate(cache.evictable):
        x = MARGIN + 270 + i * 62
        picture.block(x, y - 22, 54, HIGH, "evictable")
        picture.rect(x + 14, y - 15, 26, 20, "paper", 8)
        picture.text(x + 27, y, str(block), "ink", 14, "middle", bold=True)
    picture.note("tails go before heads, so that what is left is still a prefix", above=14)
    order = ", ".join(map(str, cache.evictable))
    text = f"Prompt B shares the first two blocks of prompt A and computes its third. Eviction order: {order}"
    return picture.render("Hash chains, hits and eviction", f"{text}.")


def tiles_svg() -> Svg:
    """Lesson 10: the grid of programs, and what one of them loops over."""
    table = BlockTable(BlockAllocator(9, order=(7, 1, 3)), SIZE)
    table.append(len(SCORE))
    picture = Picture(800, 300, "One program per row and head; one block at a time")
    picture.text(MARGIN, TOP, "grid: rows \u00d7 heads", "soft")
    for row in range(5):
        for head in range(4):
            chosen = (row, head) == (2, 1)
            x, y = MARGIN + head * 40, TOP + 12 + row * 36
            picture.rect(x, y, 36, 32, "tint1" if chosen else "free")
    x = MARGIN + 250
    picture.arrow(MARGIN + 80, TOP + 100, x - 12, TOP + 100, 1)
    picture.text(
        x, TOP, f"program (2, 1): row at position {len(SCORE) - 1}, block table {table.blocks}", "soft"
    )
    for logical, block in enumerate(table.blocks):
        y, filled = TOP + 14 + logical * 62, table.filled(logical)
        picture.text(x, y + 22, f"block {block}", "ink", 13, bold=True)
        picture.slots(x + 66, y, 40, HIGH, f"tint{logical}", ["", "", "", ""])
        for masked in range(filled, SIZE):
            inside = x + 66 + masked * 40 + 1, y + 1, 38, HIGH - 2
            picture.rect(*inside, "paper", 2)
            picture.hatch(*inside)
        text = "maximum, sum, mixed" if not logical else "larger maximum? shrink, then add"
        picture.text(x + 246, y + 22, text, "ink mono", 12.5)
    picture.note("hatched slots are masked: past the row's position, or padding; one division at the end")
    words = "A program loops over the blocks of its sequence and keeps a running maximum, sum and mix"
    return picture.render("Tiles of the Triton kernel", f"{words}; masked slots take no part.")


def waste_svg(before: PoolView, after: PoolView) -> Svg:
    """Lesson 00: every slot of one memory, reserved for the longest answers and then in blocks."""
    return in_both_forms(lambda narrow: _waste(before, after, 402 if narrow else 800))


def _waste(before: PoolView, after: PoolView, width: float) -> Svg:
    picture = Picture(width, 0, "The same memory, the same requests")
    inner = width - 2 * MARGIN
    wide = inner / (before.num_blocks * before.block_size)
    rows = (
        ("room for the longest answer is reserved", before),
        ("a block is taken when the last is full", after),
    )
    lines = []
    y: float = TOP + 10
    for name, view in rows:
        tokens = sum(table.num_tokens for table in view.tables.values())
        percent = 100 * tokens / (view.num_blocks * view.block_size)
        lines.append(f"{name}: {len(view.tables)} requests run, {percent:.0f} % of the memory holds tokens")
        for line in wrap(lines[-1], int(inner / text_width("x", 13.5))):
            picture.text(MARGIN, y, line, "ink", 13.5)
            y += 18
        for number, table in enumerate(view.tables.values()):
            for logical, block in enumerate(table.blocks):
                x, filled = MARGIN + block * view.block_size * wide, table.filled(logical, view.block_size)
                held = x + 0.5, y - 8, view.block_size * wide - 1, 40
                picture.rect(*held, "paper", 2)
                picture.hatch(*held)
                if filled:
                    picture.rect(x + 0.5, y - 8, filled * wide - 1, 40, f"pure{number % 6}", 2)
        picture.draw("rect", x=MARGIN, y=y - 8, width=inner, height=40, look="rule", stroke_width=1.2)
        y += 76
    picture.height = y + 6
    picture.note("hatched: held, and empty; requests in six colours")
    return picture.render("Reserved memory and blocks", ". ".join(lines) + ".")


def order_svg(lengths: Sequence[int]) -> Svg:
    """Lesson 13: a queue in order of arrival, and the same queue with the shortest prompt first."""
    picture = Picture(640, 250, "An admission policy is an order")
    waiting = list(enumerate(lengths))
    for i, (label, key) in enumerate((("first come", 0), ("shortest first", 1))):
        x, y = MARGIN, TOP + 12 + i * 88
        picture.text(x, y, label, "soft")
        done, waits = 0, []
        for arrival, length in sorted(waiting, key=lambda request: request[key]):
            picture.rect(x, y + 10, length * 12, HIGH, f"tint{arrival}")
            picture.text(x + length * 6, y + 32, "ABCDEF"[arrival], "ink", 13, "middle", bold=True)
            waits.append(done)
            x, done = x + length * 12 + 4, done + length
        picture.text(x + 12, y + 32, f"mean wait {sum(waits) / len(waits):.1f} tokens", "ink", 13)
    picture.note("the width is the length of the prompt: long prompts in front make all others wait")
    return picture.render(
        "Two orders of one queue", "First come, first served; and the shortest prompt first."
    )


def loop_svg() -> Svg:
    """Lesson 11: what a request passes in each step of the engine."""
    boxes = ("add_request", "schedule", "execute", "commit", "output")
    words = ("it waits", "plan: tokens, blocks", "model and samples", "tokens go to sequences", "text")
    picture = Picture(860, 190, "The life of a request: three calls, again and again")
    wide, step, y = 124, 170, TOP + 24
    for i, (name, text) in enumerate(zip(boxes, words)):
        x = MARGIN + i * step
        picture.rect(x, y, wide, 44, f"tint{0 if 0 < i < 4 else 4}")
        picture.text(x + wide / 2, y + 27, name, "ink mono", 13, "middle", bold=True)
        picture.text(x + wide / 2, y + 62, text, "soft", 12, "middle")
        if i:
            picture.arrow(x - step + wide + 4, y + 22, x - 4, y + 22, 0)
    left, right = MARGIN + step + wide / 2, MARGIN + 3 * step + wide / 2
    picture.draw("path", d=f"M{right:g} {y - 4:g}v-18H{left:g}v12", look="edge1", stroke_width=1.8)
    picture.draw("path", d=f"M{left:g} {y - 2:g}l-4 -8h8z", look="hue1")
    picture.text((left + right) / 2, y - 27, "until it ends: one step per token", "soft", 12.5, "middle")
    return picture.render("The life of a request", " \u2192 ".join(boxes) + ".")


def lessons_svg(lessons: Sequence[tuple[str, str, Sequence[str]]]) -> Svg:
    """Which lesson needs which: (number, title, numbers of those it needs), each after what it needs."""
    column: dict[str, int] = {}
    for number, _, needs in lessons:
        column[number] = max((column[need] + 1 for need in needs), default=0)
    rows = {
        number: list(column.values())[:i].count(column[number]) for i, (number, _, _) in enumerate(lessons)
    }
    wide, step, high = 156, 198, 76
    height = max(rows.values()) + 1
    picture = Picture(
        2 * MARGIN + (max(column.values()) + 1) * step - 40,
        TOP + height * high + 6,
        "Which lesson needs which",
    )
    place = {number: (MARGIN + column[number] * step, TOP + rows[number] * high) for number in column}
    for number, _, needs in lessons:
        for need in needs:
            (x1, y1), (x2, y2) = place[need], place[number]
            picture.arrow(x1 + wide, y1 + 30, x2 - 3, y2 + 30, 0)
    for number, title, _ in lessons:
        x, y = place[number]
        picture.rect(x, y, wide, 60, f"tint{column[number] % 6}")
        picture.text(x + 8, y + 18, number, "ink", 13, bold=True)
        for i, line in enumerate(title_lines(title, wide - 14)):
            picture.text(x + (30 if not i else 8), y + 18 + 17 * i, line, "ink", 12)
    words = "; ".join(f"{number} needs {', '.join(needs)}" for number, _, needs in lessons if needs)
    return picture.render("Which lesson needs which", f"{words}.")


def title_lines(title: str, width: float) -> list[str]:
    """A title in lines; the first is shorter, because the number precedes it."""
    indent = 4 * " "  # as wide as the number
    lines = wrap(title, int(width / text_width("x", 12)), initial_indent=indent, break_on_hyphens=False)
    return [line.strip() for line in lines]
