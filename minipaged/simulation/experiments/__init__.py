"""One file per result of a source; `EXPERIMENTS` lists them in the order of the page."""

from minipaged.simulation.experiments import (
    chunked_prefill,
    fig02,
    fig12,
    fig13,
    fig14,
    fig15,
    fig16,
    fig17,
    fig18,
    fig19,
    growth,
    prefix_aware,
)

_FIGURES = (fig02, fig12, fig13, fig14, fig15, fig16, fig17, fig18, fig19)
EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (*_FIGURES, growth, prefix_aware, chunked_prefill)
}
