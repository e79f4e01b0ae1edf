"""The configuration of drafters with a parallel backbone and a recurrent head."""

from transformers import AutoConfig

from redrafter.drafting.dflash_config import BlockConfig
from redrafter.drafting.recurrent_form import HEADS


class ParallelConfig(BlockConfig):
    """The architecture of a parallel drafter, with the fields of `BlockConfig`, `LayerConfig` and `AnyDrafterConfig`.

    A block has a position for each draft. The layers compute all of them in one pass, as in DFlash (arXiv 2602.06036).
    They attend to an entry of each token but the first: a key of the token before and a value of the token, both of
    fused hidden states and embeddings. The head makes a draft depend on those before it on its beam. Below, p is the
    output of the layers at a position, e the embedding of the token before it, h the target's hidden state, and s the
    recurrent state.

    Attributes:
        head: "recurrent", `x = P p + S s + O SiLU(H [p, s] + b)` with the gated cell of `DrafterConfig`,
            `s' = (1 - g) s + g SiLU(c)` with `g = sigmoid(a)` and `[a, c] = G [e, s, h] + b'`; "markov", the same with
            `s = 0` before each position, so that a draft depends on the one before it alone, as in DSpark; or "none",
            `x = P p`. Logits are the product of x with the head's weight.
        head_rank: R, width of x.
        head_shortlist: Number of ids that `P p` proposes at each position, the only ones that the head scores there for
            every beam; a search with more beams gets as many. None for a head that scores all ids for every beam.
    """

    model_type = "redrafter_parallel"

    head: str = "recurrent"
    head_rank: int = 512
    head_shortlist: int | None = None
    causal: str = "all"

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        super().check()
        self.require("head", self.head in HEADS, f"be one of {HEADS}")
        self.require("own_embedding", not self.own_embedding, "be false: it uses the target's")
        self.require("conv_kernel_size", self.conv_kernel_size is None, "be None")


AutoConfig.register(ParallelConfig.model_type, ParallelConfig, exist_ok=True)
