"""A vision encoder before the decoder, Qwen3-VL's: its sizes, and the patches that images are cut into
(transformers/models/qwen3_vl/modeling_qwen3_vl.py, 5.23; megatron/bridge/models/qwen_vl, Megatron-Bridge 0.6)."""

from __future__ import annotations

from math import isqrt
from typing import Annotated

from pydantic import Field

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.validate import BadKey

__all__ = ["Vision", "check_vision"]

Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=2**16)]
CHANNELS = 3  # red, green, blue


@section
class Vision:
    """A vision encoder as Qwen3-VL has it: patches of images, blocks with LayerNorms and biases in which the patches of
    an image attend to each other, and a projector that makes one token of each square of patches."""

    depth: int = key("Blocks of the encoder", ge=1, le=10_000)
    hidden_size: Size = key("Width of the encoder's residual stream")
    ffn_hidden_size: Size = key("Inner width of its MLP")
    num_attention_heads: Count = key("Its attention heads")
    patch_size: Count = key("Pixels along one side of a patch", default=16)
    temporal_patch_size: Count = key("Frames of a patch; an image is repeated", default=2)
    merge_size: Count = key("Patches along one side of the square that becomes one token", default=2)
    position_embeddings: Count = key("Learned positions, a square, stretched to each image", default=2304)
    deepstack: tuple[int, ...] = key(
        "Blocks, counted from 0, whose output is added to one of the decoder's first layers each, through a projector "
        "of its own",
        default=(),
    )
    image_size: int | None = key(
        "Pixels along one side of an image as it is cut into patches; absent = those of the learned positions",
        default=None,
        ge=1,
        le=2**16,
    )
    images_per_sample: Count = key("Images in each sequence; their tokens are among the sequence's", default=1)
    frozen: bool = key("Blocks and patch embedding are not trained, projectors are", default=False)

    @property
    def patches_per_image(self) -> int:
        """Patches of one image."""
        if self.image_size is None:
            return isqrt(self.position_embeddings) ** 2
        return (self.image_size // self.patch_size) ** 2

    @property
    def patches_per_sample(self) -> int:
        """Patches of all images of one sequence."""
        return self.images_per_sample * self.patches_per_image

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that the decoder gets of them."""
        return self.patches_per_sample // self.merge_size**2

    @property
    def patch_width(self) -> int:
        """Numbers in one patch."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_width(self) -> int:
        """Columns of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def projectors(self) -> int:
        """What makes tokens of patches: one behind the last block, and one for each of `deepstack`."""
        return 1 + len(self.deepstack)


def check_vision(vision: Vision, layers: int) -> None:
    """Raise `BadKey` for sizes of the encoder that do not agree with each other, or with the decoder's `layers`."""
    if vision.hidden_size % vision.num_attention_heads:
        raise BadKey(
            ("vision", "num_attention_heads"),
            f"must divide hidden_size {vision.hidden_size}, not be {vision.num_attention_heads}",
        )
    square = vision.patch_size * vision.merge_size
    if vision.image_size is not None and vision.image_size % square:
        raise BadKey(
            ("vision", "image_size"),
            f"must be a multiple of {square} (patch_size x merge_size), not {vision.image_size}",
        )
    side = isqrt(vision.position_embeddings)
    if side**2 != vision.position_embeddings or (vision.image_size is None and side % vision.merge_size):
        raise BadKey(
            ("vision", "position_embeddings"),
            f"must be the square of a multiple of merge_size ({vision.merge_size}), not {vision.position_embeddings}",
        )
    if len(set(vision.deepstack)) != len(vision.deepstack) or not all(
        0 <= at < vision.depth for at in vision.deepstack
    ):
        raise BadKey(("vision", "deepstack"), f"must name different blocks from 0 to {vision.depth - 1}")
    if len(vision.deepstack) > layers:
        raise BadKey(("vision", "deepstack"), f"names more blocks than the decoder has layers ({layers})")
