"""What Megatron-LM's `pretrain_gpt.py` does about its dataset (core 0.19); the script is not in the published wheel."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def reads_data(args: Any, vp_stage: int | None = None) -> bool:
    """pretrain_gpt.py is_dataset_built_on_rank: tensor rank 0 of the stages that see tokens."""
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    with_mtp = mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)
    return mpu.get_tensor_model_parallel_rank() == 0 and bool(is_first_or_last_pipeline_stage(vp_stage) or with_mtp)


def datasets_provider(samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    kind, reads = MockGPTDataset if args.mock_data else GPTDataset, partial(reads_data, args, vp_stage)
    return BlendedMegatronDatasetBuilder(kind, samples, reads, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    pretrain(None, datasets_provider)
