"""Hidden states of packed sequences with images.

Each image's features are computed once per microbatch, or once at all where the vision tower is
frozen, and placed where its placeholders are. T packed tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.engines.language_model import encoder_weights, language_model
from agenttrain.engines.vision import Features, Piece, Vision, embed
from agenttrain.training.attention import PackedTree
from agenttrain.training.batch import Microbatch, PackedImages
from agenttrain.training.segments import packed_positions
from agenttrain.training.transfers import to_device


def hidden_with_images(
    model: PreTrainedModel,
    vision: Vision,
    microbatch: Microbatch,
    images: PackedImages,
    *,
    packed: bool,
    varlen: bool,
    begin: Callable[[Tensor], object],
) -> Tensor:
    """Return the last hidden states of a microbatch with images, [T, H].

    With `packed` one forward pass of the language model computes all segments, else one for each.
    With `varlen` a packed pass uses torch's varlen kernel.

    Where experts are replayed, a mixture of experts computes with those that the engine recorded.
    They are loaded for all tokens of the microbatch. A packed pass uses them as they are. `begin`
    is called before the pass of one segment, with the packed positions of its tokens, and selects
    theirs.
    """
    # Each image's features are computed once, however many pieces of the tokens show it.
    by_digest = {piece.image.sha256: piece.image for piece in images.pieces}
    features: dict[str, Features]
    if vision.frozen:  # cached from step to step
        features = {digest: vision.features(model, image) for digest, image in by_digest.items()}
    else:
        computed = vision.compute(model, [*by_digest.values()], grad=torch.is_grad_enabled())
        features = dict(zip(by_digest, computed, strict=True))
    language = language_model(model)
    ids_T, segments = microbatch.token_ids_T, microbatch.segments
    device = images.positions_3T.device
    if packed:
        output = language(
            **embed(model, ids_T[None], images.pieces, features),
            position_ids=images.positions_3T[:, None],
            **PackedTree(segments, device, use_varlen=varlen).keywords(model),
        )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH
    hidden_of_segments = []
    for segment in segments:  # one pass for each, after its prefix
        places_T = to_device(packed_positions(segment), device)
        begin(places_T)
        output = language(
            **embed(
                model, ids_T[places_T][None], _select_pieces(images.pieces, places_T), features
            ),
            position_ids=images.positions_3T[:, None, places_T],
            use_cache=False,
        )
        hidden_of_segments.append(output.last_hidden_state[0, segment.prefix_length :])
    return torch.cat(hidden_of_segments)


def _select_pieces(pieces: tuple[Piece, ...], places_T: Tensor) -> list[Piece]:
    """Return the pieces at these packed positions, each placed at its index in `places_T`."""
    index_of = {place: index for index, place in enumerate(places_T.tolist())}
    return [
        piece._replace(place=index_of[piece.place]) for piece in pieces if piece.place in index_of
    ]


def freeze_encoders(model: PreTrainedModel) -> None:
    """Take the weights of a model's encoders, of images and of sound, out of training."""
    for weight in encoder_weights(model).values():
        weight.requires_grad_(False)
