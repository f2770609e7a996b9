"""All pictures of the documentation, made by the code they show.

    python -m minipaged.viewer.pictures.build --out docs/assets

A test compares the files there with what this makes; after a change here, run the command again.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from minipaged.viewer.pictures import ideas, later, runs, scenes
from minipaged.viewer.pictures.logo import card_svg, logo_svg
from minipaged.viewer.pictures.plan import plan_svg
from minipaged.viewer.pictures.pool import pool_svg
from minipaged.viewer.pictures.ranks import ranks_svg
from minipaged.viewer.pictures.svg import Svg
from minipaged.viewer.pictures.tables import tables_svg
from minipaged.viewer.pictures.tree import tree_svg


def pictures() -> dict[str, Svg]:
    """File name -> SVG."""
    made: dict[str, Svg] = {"logo.svg": logo_svg(), "social-card.svg": card_svg()}
    (both,) = scenes.fig7()
    made["block-table.svg"] = tables_svg(both.view, scenes.text_of, both.caption)
    made["ranks.svg"] = ranks_svg(scenes.fig4(), num_blocks=9)
    for name, scene in (("append", scenes.fig6()), ("copy-on-write", scenes.fig8())):
        for number, (caption, view) in enumerate(scene, start=1):
            made[f"{name}-{number}.svg"] = tables_svg(view, scenes.text_of, caption)
    before, after = scenes.fig9()
    made["beams-1.svg"] = tree_svg(before.view, caption=before.caption)
    made["beams-2.svg"] = tree_svg(after.view, before.view, after.caption)
    swapped = "C is swapped out: its blocks are on the host"
    made["preemption.svg"] = pool_svg(runs.preempted().planned, swapped)
    for number, record in enumerate(runs.chunked(), start=1):
        made[f"step-plan-{number}.svg"] = plan_svg(record, budget=32)
    for number, record in enumerate(runs.prompts_first(), start=1):
        made[f"prefill-first-{number}.svg"] = plan_svg(record, budget=32)
    for policy, caption in runs.POLICIES.items():
        made[f"growth-{policy.replace('_', '-')}.svg"] = pool_svg(runs.grown(policy, max_tokens=87), caption)
    reserved, grown = (runs.grown(policy, max_tokens=52) for policy in ("reserve", "on_demand"))
    made["waste.svg"] = ideas.waste_svg(reserved, grown)
    made["free-list.svg"] = ideas.free_list_svg()
    made["gather.svg"] = ideas.gather_svg()
    made["hash-chain.svg"] = ideas.chain_svg()
    made["tiles.svg"] = ideas.tiles_svg()
    made["queue.svg"] = ideas.order_svg((9, 3, 6, 12, 3))
    made["loop.svg"] = ideas.loop_svg()
    made["after-radix.svg"] = later.radix_svg()
    made["after-window.svg"] = later.window_svg()
    made["after-latent.svg"] = later.latent_svg()
    made["after-states.svg"] = later.states_svg()
    made["after-quantised.svg"] = later.quantised_svg()
    made["after-tiers.svg"] = later.tiers_svg()
    made["after-disaggregated.svg"] = later.disaggregated_svg()
    made["after-draft.svg"] = later.draft_svg()
    return made


def main(arguments: list[str] | None = None) -> None:
    """Write the pictures to the folder of `--out`."""
    parser = argparse.ArgumentParser(prog="python -m minipaged.viewer.pictures.build", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder for the SVG files.")
    folder = parser.parse_args(arguments).out
    logging.getLogger("minipaged").setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (folder / name).write_text(svg, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
