"""Routers of mixture-of-experts layers: their choices recorded, or replaced by recorded ones.

A router scores all experts for a token, chooses some of them with `topk`, and hands their numbers
and weights to a module that has the experts. While a router runs, its call of `topk` is
intercepted. The numbers that it returns are recorded, or replaced together with their scores. The
router then computes the weights of the replaced experts from its own scores, with a gradient, as R3
does (https://arxiv.org/abs/2510.11370). Families differ in what they score and how they weigh, not
in this.

`find_routers` finds the routers of a model by a forward pass, and tries the replacement on them.

Shapes: T tokens of a forward pass, L layers of the model, K experts that a layer chooses for a
token, R rows of an engine's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agenttrain.types import AgenttrainError, Routes

TOPK = (torch.topk, torch.Tensor.topk)
"""Functions by which routers choose."""
MOST_EXPERTS = 2**15
"""Numbers of experts are handled in 16 bits with a sign."""
TRIAL_TOKENS = 9
"""Tokens of the forward passes of `find_routers`."""


class UnknownRouters(AgenttrainError):
    """The experts of a model cannot be recorded or replaced. The message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouter:
    """A module that chooses the experts of a layer, by a call of `topk` that is intercepted."""

    name: str
    """Name of the module in the model, e.g. model.layers.3.mlp.gate."""
    layer: int
    """Number of the layer in the model."""
    topk_call: int
    """Index of the call that chooses, among the module's calls of `topk` in one forward pass: a
    router may first choose groups of experts by `topk` too."""
    experts: int
    """Number of experts to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a model, one for each layer that has experts."""

    routers: tuple[LayerRouter, ...]
    layers: int
    """Layers of the model (L), those without experts included."""
    top_k: int
    """Experts that a layer chooses for a token (K)."""

    def find_problem(self, experts_RLK: Tensor) -> str | None:
        """Return why recorded experts of R tokens cannot be choices of these routers, or None."""
        layers, top_k = experts_RLK.shape[1:]
        if (layers, top_k) != (self.layers, self.top_k):
            return (
                f"{top_k} experts in each of {layers} layers, where the model has {self.top_k} in "
                f"each of {self.layers}"
            )
        if len(experts_RLK) == 0:  # no tokens: `min` and `max` below need some
            return None
        for router in self.routers:
            sorted_RK = experts_RLK[:, router.layer].sort(-1).values
            lowest, highest = int(sorted_RK.min()), int(sorted_RK.max())
            if lowest < 0 or highest >= router.experts:
                wrong = highest if lowest >= 0 else lowest
                return f"expert {wrong} in layer {router.layer}, which has {router.experts}"
            # An engine that recorded nothing for a layer leaves zeros there.
            if (sorted_RK[:, 1:] == sorted_RK[:, :-1]).any():
                return f"an expert twice for a token in layer {router.layer}"
        return None


Choose = Callable[[LayerRouter, Tensor], Tensor | None]
"""Called with a router and the experts that it has chosen, [..., K]. Returns the experts to use in
their place, or None."""


@contextmanager
def intercepting(
    model: nn.Module, routers: Sequence[LayerRouter], choose: Choose
) -> Iterator[None]:
    """Call `choose` in the block whenever a router has chosen. The hooks are removed at the end."""
    handles = []
    try:
        for router in routers:
            module, hooks = model.get_submodule(router.name), _Hooks(router, choose)
            handles.append(module.register_forward_pre_hook(hooks.enter))
            # Also after an error, such as the one with which torch ends a recomputation early.
            handles.append(module.register_forward_hook(hooks.leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hooks:
    """Hooks around a router's forward pass, in which its calls of `topk` are intercepted.

    `choose` gets the experts that the router has chosen, and may return others in their place. An
    `_Interception` acts only in the thread that has entered it. The hooks run in the thread of the
    forward pass, so they enter and leave it.
    """

    def __init__(self, router: LayerRouter, choose: Choose) -> None:
        self._router, self._choose = router, choose
        self._entered: list[_Interception] = []
        """Interceptions of the passes that run: more than one if a pass begins inside another."""

    def enter(self, module: nn.Module, args: Any) -> None:
        mode = _Interception(self._router, self._choose)
        mode.__enter__()
        self._entered.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the interception, also if the pass has raised (`always_call`)."""
        self._entered.pop().__exit__(None, None, None)


class _Interception(TorchFunctionMode):
    """Passes the result of a router's call of `topk` to `choose`, and replaces it by the answer.

    Entered for one forward pass of the router, which may call `topk` for other choices too.
    """

    def __init__(self, router: LayerRouter, choose: Choose) -> None:
        super().__init__()
        self._router, self._choose = router, choose
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function. In the router's own call of `topk`, put other experts in place."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in TOPK:
            return result
        call, self._calls = self._calls, self._calls + 1  # the number of this call in the pass
        replacement: Tensor | None = None
        if call == self._router.topk_call:
            replacement = self._choose(self._router, result.indices)
        if replacement is None:
            return result
        scores = args[0] if args else kwargs["input"]
        # The scores that `topk` itself returns for the same experts, to the bit.
        return type(result)((scores.gather(-1, replacement), replacement))


class RouteRecorder:
    """Records the experts of the last token of each row, for an engine.

    A token is sampled from the last one that its row was fed.
    """

    def __init__(self, model: nn.Module, max_rows: int) -> None:
        """Find the model's routers. Raises UnknownRouters if their choices cannot be recorded.

        `max_rows` is the number of rows of the engine's cache.
        """
        self._model = model
        self._routers = find_routers(model)
        self._last_RLK = torch.zeros(
            (max_rows, self._routers.layers, self._routers.top_k),
            dtype=torch.int32,
            device=next(model.parameters()).device,
        )
        """Experts of the last token of each of R rows: K in each of L layers. `recording` writes
        them, and `last` reads them."""

    @contextmanager
    def recording(self, first: int, rows: int) -> Iterator[None]:
        """Record the experts of each row's newest token in the forward pass of the block.

        The pass is over rows `first` to `first + rows` - 1. Their tokens T are padded on the left,
        so the newest is the last. `last` reads them, for R rows, L layers and K experts.
        """

        def record(router: LayerRouter, experts: Tensor) -> None:
            experts_RTK = experts.reshape(rows, -1, self._routers.top_k)
            self._last_RLK[first : first + rows, router.layer] = experts_RTK[:, -1].int()

        with intercepting(self._model, self._routers.routers, record):
            yield

    def last(self, rows: int) -> list[Routes]:
        """Return the routes of the last token of each of the first `rows` rows."""
        experts_RLK = self._last_RLK[:rows].cpu().numpy().astype("<u2")
        layers, top_k = experts_RLK.shape[1:]
        return [
            Routes(experts=experts_LK.tobytes(), layers=layers, top_k=top_k)
            for experts_LK in experts_RLK
        ]


class RouteReplay:
    """Replaces the choices of a model's routers by recorded ones, for the trainer.

    `load` sets the experts of a microbatch, for T tokens in L layers K experts each. If the trainer
    feeds parts of it one by one, `select` narrows them to a part before its forward pass. They stay
    until the next call of either, because the backward pass may compute layers again.
    """

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self._loaded_TLK: Tensor | None = None
        """Experts that `load` has set."""
        self._pass_TLK: Tensor | None = None
        """Experts of the next forward pass: the loaded ones, or those at the selected positions."""
        self._comparison: Tensor | None = None
        """[2] Numbers of equal and of compared choices, to which `_choose` adds in the block of
        `comparing`. None outside of it."""

    def load(self, routes_TLK: Tensor | None) -> None:
        """Replay these experts. None: the routers choose themselves.

        For a token and layer without a record all K are -1: there the router chooses itself too.
        """
        self._loaded_TLK = self._pass_TLK = routes_TLK

    def select(self, places_T: Tensor) -> None:
        """Replay the loaded experts of these positions in the next forward pass.

        The trainer calls it for each segment of a packed sequence that it feeds alone.
        """
        if self._loaded_TLK is not None:
            self._pass_TLK = self._loaded_TLK[places_T.to(self._loaded_TLK.device)]

    def installed(self, model: nn.Module) -> Any:
        """Return the context manager in which forward passes of the model replay."""
        return intercepting(model, self.routers.routers, self._choose)

    @contextmanager
    def comparing(self, device: torch.device) -> Iterator[Tensor]:
        """Compare the experts that `load` has set with the routers' own, and replay nothing.

        Yields two counts, [2], to which each forward pass in the block adds: the pairs (token,
        layer) whose two sets of experts are equal, and all pairs with recorded experts.
        """
        self._comparison = torch.zeros(2, device=device)  # `_choose` adds to it
        try:
            yield self._comparison
        finally:
            self._comparison = None

    def _choose(self, router: LayerRouter, chosen: Tensor) -> Tensor | None:
        """Return the recorded experts of a layer for the tokens of a forward pass.

        Where none are recorded they are those that the router has `chosen`. None: the router keeps
        all of its choices, because nothing is loaded, or because `comparing` only counts.
        """
        if self._pass_TLK is None:
            return None
        recorded = self._pass_TLK[:, router.layer].view(chosen.shape).long()
        is_recorded = recorded[..., :1] >= 0  # else all K are -1
        if self._comparison is None:
            return torch.where(is_recorded, recorded, chosen)
        is_equal = (recorded.sort(-1).values == chosen.sort(-1).values).all(-1, keepdim=True)
        self._comparison += torch.stack(((is_equal & is_recorded).sum(), is_recorded.sum()))
        return None


NO_EXPERTS = "has no layer that chooses experts"


def check_experts(model: nn.Module) -> None:
    """Raise UnknownRouters for a model without experts; it may be on the meta device.

    A module with experts knows their number, and has a weight [experts, …] for each projection.
    """
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        if any(w.dim() == 3 and len(w) == experts for w in module.parameters(recurse=False)):
            return
    raise _refusal(model, NO_EXPERTS)


def _refusal(model: nn.Module, problem: str) -> UnknownRouters:
    return UnknownRouters(
        f"algorithm.router_replay=rollout: {type(model).__name__} {problem}. Set "
        "algorithm.router_replay=off, or choose another model."
    )


def find_routers(model: Any) -> Routers:
    """Return the routers of a model. Raises UnknownRouters if their choices cannot be replaced.

    Runs two forward passes over a few tokens, without gradients: one to find the routers, and one
    in which their choices are replaced.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    # Different tokens, for which a router should choose different experts.
    ids_1T = (torch.arange(TRIAL_TOKENS, device=device) * 7 % vocabulary)[None]

    def run() -> None:
        model(input_ids=ids_1T, use_cache=False)

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            search = _Search(model)
            with search:
                run()
            problem = search.problem or _why_not_replaced(model, search.routers, run)
    finally:
        model.train(was_training)
    if problem is not None:
        raise _refusal(model, problem)
    return Routers(
        routers=search.routers,
        layers=model.config.get_text_config().num_hidden_layers,
        top_k=search.top_k,
    )


@dataclass(slots=True)
class _Frame:
    """A module that is running, with the calls of `topk` since it began, inner modules' included.

    If the module turns out to be a router, one of these calls has chosen its experts.
    """

    name: str
    results: list[Tensor] = field(default_factory=list)
    """Result of each call: the indices of the highest scores."""
    score_counts: list[int] = field(default_factory=list)
    """Number of scores among which each call chose."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Experts that a module returned, and the call of `topk` that chose them."""

    indices: Tensor
    module_name: str
    topk_call: int
    """Index of the call among those of the module."""
    experts: int
    """Number of experts to choose from."""


class _Search(TorchFunctionMode):
    """Finds the routers in a forward pass that runs in its block.

    A router is the innermost module that returns the indices of a `topk` in it, if another module
    gets these indices together with weights of their shape. That module has the experts. Example:
    in Qwen3-MoE, `mlp.gate` returns the indices, and `mlp.experts` gets them.

    Hooks before and after every module follow the indices: `_begin` sees what a module gets, and
    `_end` what it returns. In between, `__torch_function__` sees its calls of `topk`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._stack: list[_Frame] = []
        """Modules that are running, the innermost last."""
        self._choices: list[_Choice] = []
        """Calls of `topk` whose indices some module has returned: each module may be a router."""
        self._found: list[tuple[LayerRouter, _Choice]] = []
        """Routers, each with the choice of it that has reached a module with experts."""
        self._unexplained: list[str] = []
        """Names of modules that got experts which come from no call of `topk`."""
        self._handles: list[Any] = []
        """Handles of the hooks, to remove them."""

    def __enter__(self) -> Any:
        for name, module in self._model.named_modules():
            enter, leave = partial(self._begin, name), partial(self._end, name)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function. Note a result of `topk` for every module that is running.

        Any of them may be the router: the innermost one may only compute `topk` for it. `_end`
        finds the module that returns the result.
        """
        result = func(*args, **(kwargs or {}))
        if func in TOPK:
            scores = args[0] if args else (kwargs or {})["input"]
            for frame in self._stack:
                frame.results.append(result.indices)
                frame.score_counts.append(scores.shape[-1])
        return result

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module begins. If it gets experts, note the router that has chosen them.

        Experts come as indices with weights of the same shape. Their router is the module that
        returned these indices earlier in the pass: `_end` has added them to `_choices`.
        """
        self._stack.append(_Frame(name))  # collects its calls of `topk` until `_end`
        pair = _experts_and_weights([*args, *kwargs.values()])
        if pair is None:
            return
        indices, _ = pair
        # The latest one: routers of several layers may have chosen alike.
        matching = (c for c in reversed(self._choices) if _is_same(c.indices, indices))
        choice = next(matching, None)
        if choice is None:  # chosen without `topk`: `problem` refuses the model
            self._unexplained.append(name)
            return
        router = LayerRouter(
            name=choice.module_name,
            layer=_layer_of(choice.module_name),
            topk_call=choice.topk_call,
            experts=choice.experts,
        )
        if all(router.name != earlier.name for earlier, _ in self._found):
            self._found.append((router, choice))

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note the choices that a module returns, unless a module in it has returned them.

        A choice is the result of a call of `topk`: indices of experts. The module's frame has the
        results of all calls since the module began, those of modules in it included.
        """
        frame = self._stack.pop()  # the module's own: `_begin` has put it there
        returned = output if isinstance(output, tuple | list) else (output,)
        for call, indices in enumerate(frame.results):
            # By value too: the module may return a copy.
            is_returned = any(
                isinstance(value, Tensor) and _is_same(value, indices) for value in returned
            )
            # By identity: another layer may have chosen experts with equal numbers. A module in
            # this one has ended earlier, and noted the choice if it returned it.
            is_noted = any(choice.indices is indices for choice in self._choices)
            if is_returned and not is_noted:
                experts = frame.score_counts[call]  # the router scores each expert
                self._choices.append(_Choice(indices, name, call, experts))

    @property
    def routers(self) -> tuple[LayerRouter, ...]:
        """The routers in the order of their layers."""
        return tuple(sorted((r for r, _ in self._found), key=lambda router: router.layer))

    @property
    def top_k(self) -> int:
        """Number of experts that each router chooses."""
        return self._found[0][1].indices.shape[-1]

    @property
    def problem(self) -> str | None:
        """Reason why the routers that were found cannot be used, or None."""
        if self._unexplained:
            return f"has experts whose router is not found ({self._unexplained[0]})"
        if not self._found:
            return NO_EXPERTS
        if len({router.layer for router, _ in self._found}) < len(self._found):
            return "has layers with several routers"
        if len({choice.indices.shape[-1] for _, choice in self._found}) > 1:
            return "has layers that choose different numbers of experts"
        largest = max(choice.experts for _, choice in self._found)
        return f"has {largest} experts in a layer" if largest > MOST_EXPERTS else None


def _experts_and_weights(values: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Return the numbers and weights of experts among the inputs or outputs of a module, or None.

    They are integers and floats of one shape, a row for each token of the trial.
    """
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim() == 2]
    for indices in tensors:
        if indices.is_floating_point() or indices.dtype is torch.bool:
            continue
        if indices.shape[0] != TRIAL_TOKENS:
            continue
        for weights in tensors:
            if weights.is_floating_point() and weights.shape == indices.shape:
                return indices, weights
    return None


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are one, or are equal choices."""
    if a is b:
        return True
    return a.dtype == b.dtype and a.shape == b.shape and not a.is_meta and torch.equal(a, b)


def _layer_of(name: str) -> int:
    """Return the number of the layer in a module's name, or -1 if there is none.

    Example: 3 of model.layers.3.mlp.gate.
    """
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _why_not_replaced(
    model: nn.Module, routers: Sequence[LayerRouter], run: Callable[[], None]
) -> str | None:
    """Return why a router does not use experts that replace its choice, or None if all do.

    During a forward pass (`run`) each router runs again on its inputs, with other experts in place
    of those that it chooses. `_problem_of` compares the outputs.
    """
    problems: list[str | None] = []

    def check_router(
        router: LayerRouter, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Check a router on the inputs that it has just had: a forward hook.

        Appends to `problems` why its choice cannot be replaced by other experts, or None.
        """

        def outputs_with(choose: Choose) -> Sequence[Any]:
            """Run the router with its choice replaced by `choose`."""
            with _Interception(router, choose):
                # Not `module(...)`, which would call this hook again.
                returned: Sequence[Any] = module.forward(*args, **kwargs)
            return returned

        problems.append(_problem_of(router, outputs_with))

    # Inside the pass, where FSDP2 has gathered the weights of the layer.
    handles = [
        model.get_submodule(router.name).register_forward_hook(
            partial(check_router, router), with_kwargs=True
        )
        for router in routers
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return next((problem for problem in problems if problem is not None), None)


def _problem_of(router: LayerRouter, outputs_with: Callable[[Choose], Sequence[Any]]) -> str | None:
    """Return why replaced choices of a router do not have the right effect, or None.

    `outputs_with(choose)` runs the router with its choice replaced by `choose`, and returns its
    outputs: for each token its K experts, and their weights. Experts in the opposite order must get
    the same weights in that order, and the experts of another token must get weights above 0.
    """
    # None: the router's own choice.
    plain = _experts_and_weights(outputs_with(lambda _, experts: None))
    flipped = _experts_and_weights(outputs_with(lambda _, experts: experts.flip(-1)))
    # Each token gets the experts of the token before it.
    foreign = _experts_and_weights(outputs_with(lambda _, experts: experts.roll(1, -2)))
    if plain is None or flipped is None or foreign is None:
        return f"returns experts without their weights from {router.name}"
    experts_TK, weights_TK = plain
    was_replaced = torch.equal(flipped[0], experts_TK.flip(-1))
    if not was_replaced or not torch.equal(foreign[0], experts_TK.roll(1, -2)):
        return f"does not use the experts that replace those of {router.name}"
    gap = (flipped[1] - weights_TK.flip(-1)).abs().max().item()
    tolerance = 1e-4 if weights_TK.dtype is torch.float32 else 2e-2  # for rounding
    if not gap <= tolerance * weights_TK.abs().max().item():  # NaN is a gap
        return f"does not weigh the experts that replace those of {router.name}"
    if not (foreign[1].isfinite().all() and (foreign[1] > 0).all()):
        return f"gives no weight to experts that {router.name} would not choose"
    return None
