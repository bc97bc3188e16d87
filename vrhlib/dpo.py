"""Preference pairs from an ablated policy, and a policy trained on them (the paper's Appendix B, after RetMask).

A pair's *chosen* reply is sampled from the model as it is, its *rejected* one from the same model without its visual
retrieval heads: a reply of the right form that looks away. The control is the same with random heads. Training is TRL's
`DPOTrainer`. A policy is a PEFT adapter (or all weights) in safetensors, with a manifest, and is trained once: asked
for again with the same pairs and recipe it is read, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import math
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from vrhlib import store
from vrhlib.attention import KERNEL, Ablation, acting, fitting, generate
from vrhlib.boxes import Box
from vrhlib.evaluate import missing
from vrhlib.heads import HeadSet
from vrhlib.outcomes import IOU, judged
from vrhlib.samples import Sample, Samples
from vrhlib.stats import over_seeds, paired_difference
from vrhlib.training import KEEP, Recipe, refuse_if_too_large
from vrhlib.vlm import VLM

# ---------------------------------------------------------------- pairs


@dataclass(frozen=True)
class RandomHeads:
    """As many heads as `instead_of` has, drawn anew for every sample from outside it: the paper's control.

    The first layer is left out, as there; that the detected heads are, too, is ours (the paper does not say).
    """

    instead_of: HeadSet
    seed: int = 0
    skip_layers: tuple[int, ...] = (0,)

    def of(self, sample: Sample) -> Ablation:
        seed = int(store.digest([self.seed, sample.fingerprint])[:8], 16)
        return Ablation(self.instead_of.controls(len(self.instead_of), seed, skip_layers=self.skip_layers))

    def describe(self, samples: Samples) -> dict:
        return {"drawn": store.digest([self.of(s).describe() for s in samples]), "of": len(self.instead_of)}


def preference_pairs(
    vlm: VLM,
    samples: Samples,
    rejected: Mapping[str, Ablation | RandomHeads],
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
) -> pd.DataFrame:
    """A pair for every sample and kind of rejected reply; stored, and resumed with the same draws.

    `rejected`: a name for each kind of pair, and what is cut while its rejected replies are written. All kinds share
    the chosen replies. `temperature` is that of both sides; the paper gives none. One row per sample and kind: id,
    image, benchmark (of `samples`), kind, text (the expression), chosen, rejected (as generated, special tokens
    included), said, denied (the same without them), chosen_box, rejected_box (None where none was read), chosen_iou,
    rejected_iou (0 there), equal (the same reply twice: such a pair teaches nothing), worse (the chosen box is worse),
    retokenised (a text is read back as other tokens than were sampled). attrs["runs"]: digests behind it.
    """
    acting_of = {"chosen": None, **rejected}
    if len(acting_of) <= len(rejected):
        raise ValueError("A kind of pair cannot be called 'chosen'; that is the other reply.")
    prints, limit = tuple(s.fingerprint for s in samples), samples.max_new_tokens or vlm.max_new_tokens
    runs = {
        name: store.Run(
            task="pairs", benchmark=f"{samples.benchmark} {samples.split}", kernel=KERNEL, batch_size=batch_size,
            samples=prints, condition=_described(cut, samples), data=samples.origin,
            decoding={"temperature": temperature, "seed": seed, "side": "chosen" if cut is None else "rejected",
                      "max_new_tokens": limit}, **vlm.identity(),
        )
        for name, cut in acting_of.items()
    }  # fmt: skip
    with ExitStack() as stack:
        stored = {}
        for _, name in sorted((run.digest, name) for name, run in runs.items()):  # one order for all processes
            stored[name] = stack.enter_context(store.open_run(runs[name], vlm.profile))
        starts = [i for i in range(0, len(samples), batch_size) if missing(samples[i : i + batch_size], stored)]
        label = f"{samples.benchmark} {samples.split}  pairs from {len(samples)} samples, batches of {batch_size}"
        meter = store.Meter(vlm.profile, vlm.name, vlm.device.type)
        for start in store.progress(starts, label):
            chunk = samples[start : start + batch_size]
            fitting(vlm, partial(_sample, vlm, chunk, acting_of, stored, temperature, seed, limit, meter))
        meter.close()
        rows = [
            _pair(vlm, s, kind, stored["chosen"].records[s.id], stored[kind].records[s.id])
            for kind in rejected
            for s in samples
        ]
    frame = pd.DataFrame(rows).assign(benchmark=samples.benchmark)
    frame.attrs["runs"] = sorted(run.digest for run in runs.values())
    return frame


def _described(cut: Ablation | RandomHeads | None, samples: Samples) -> dict:
    return cut.describe(samples) if isinstance(cut, RandomHeads) else cut.describe() if cut else {}


def _sample(vlm: VLM, chunk: Samples, cuts, stored, temperature: float, seed: int, limit: int, meter) -> None:
    """Sample and store what is missing of a chunk, `vlm.rows` sequences at a time."""
    names = missing(chunk, stored)
    step = max(1, vlm.rows // len(names))
    for i in range(0, len(chunk), step):
        piece = chunk[i : i + step]
        if not missing(piece, stored):
            continue
        batch = vlm.prepare(piece)
        vlm.running = len(piece) * len(names)
        acting_on = [[c.of(s) if isinstance(c := cuts[name], RandomHeads) else c for name in names] for s in piece]
        # The side, not the kind, is in a draw's seed: kinds of rejected replies differ by their heads alone.
        sides = ["chosen" if cuts[name] is None else "rejected" for name in names]
        seeds = [[int(store.digest([seed, s.fingerprint, side])[:15], 16) for side in sides] for s in piece]
        ids = generate(vlm, batch, acting_on, limit, temperature, seeds)
        meter.add(vlm.running * batch.length, ids.size)
        for sample, resized, replies in zip(piece, batch.resized, ids):
            for name, reply in zip(names, replies):
                if sample.id not in stored[name]:
                    kept = [int(token) for token in reply if token >= 0]
                    text, finished = vlm.decode(kept)
                    raw = vlm.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                    record = {"text": text, "raw": raw, "ids": kept, "finished": finished, "resized": list(resized)}
                    stored[name].add(sample.id, record)


def _pair(vlm: VLM, sample: Sample, kind: str, chosen: Mapping, rejected: Mapping) -> dict:
    said, denied = judged(vlm, sample, chosen), judged(vlm, sample, rejected)
    again = [vlm.tokenizer(r["raw"], add_special_tokens=False)["input_ids"] != r["ids"] for r in (chosen, rejected)]
    return {
        "id": sample.id, "image": sample.image_key, "kind": kind, "text": sample.text, "chosen_box": Box.of(said),
        "rejected_box": Box.of(denied), "chosen": chosen["raw"],
        "rejected": rejected["raw"], "said": chosen["text"], "denied": rejected["text"], "chosen_iou": said["iou"],
        "rejected_iou": denied["iou"], "equal": chosen["ids"] == rejected["ids"], "worse": said["iou"] < denied["iou"],
        "retokenised": any(again),
    }  # fmt: skip


def boxes(pairs: pd.DataFrame, sample_id: str) -> dict[str, Box | None]:
    """The boxes of a sample's replies, as `figures.before_after` names them: unmasked (the chosen one), and each kind's
    rejected one; None where none could be read."""
    own = pairs[pairs.id == sample_id]
    if own.empty:
        raise ValueError(f"No pair is about {sample_id!r}.")
    return {"unmasked": own.chosen_box.iloc[0], **dict(zip(own.kind, own.rejected_box))}


def kept(pairs: pd.DataFrame, rule: Literal["all", "different", "better"] = "all") -> pd.DataFrame:
    """Pairs that a rule keeps: all (the paper), those with two different replies, or those whose chosen box is better
    by IoU. Raises ValueError for another rule, and where nothing of a kind is left."""
    if rule not in KEEP:
        raise store.unknown("rule for pairs", rule, KEEP)
    keep = {"all": pairs.equal | True, "different": ~pairs.equal, "better": pairs.chosen_iou > pairs.rejected_iou}[rule]
    if gone := sorted(set(pairs.kind) - set(pairs[keep].kind)):
        raise ValueError(
            f"The rule {rule!r} keeps no pair of {', '.join(gone)}: draw more, or at a higher temperature."
        )
    chosen = pairs[keep].reset_index(drop=True)
    chosen.attrs["runs"] = pairs.attrs.get("runs", [])
    return chosen


def counts(pairs: pd.DataFrame, rule: str = "all") -> pd.DataFrame:
    """What the pairs of each kind are: kind, pairs, equal (the same reply twice), worse (the chosen box is the worse
    one), better, chosen_right, rejected_right (IoU of 0.5 or more), retokenised (the text is read as other tokens than
    were generated), kept under the rule. Numbers of pairs."""
    left, rows = kept(pairs, rule), []
    for kind, own in pairs.groupby("kind", sort=False):
        rows.append({
            "kind": kind, "pairs": len(own), "equal": own.equal.sum(), "worse": own.worse.sum(),
            "better": (own.chosen_iou > own.rejected_iou).sum(), "chosen_right": (own.chosen_iou >= IOU).sum(),
            "rejected_right": (own.rejected_iou >= IOU).sum(), "retokenised": own.retokenised.sum(),
            "kept": (left.kind == kind).sum(),
        })  # fmt: skip
    return pd.DataFrame(rows)


# ---------------------------------------------------------------- training

# The language model's projections and nothing else: a list of names ("q_proj") would match InternVL's vision tower too.
PROJECTIONS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"


@dataclass(frozen=True)
class Policy:
    """A trained policy: where it is, what it is called, and its curves (step, loss, margin, accuracy in percent)."""

    folder: Path
    name: str
    recipe: Recipe
    curves: pd.DataFrame = field(repr=False)
    about: dict = field(repr=False)

    @property
    def digest(self) -> str:
        """Of the weights: it stands in the run keys of everything that the policy does."""
        return self.about["weights"]


def train(vlm: VLM, samples: Samples, pairs: pd.DataFrame, recipe: Recipe, name: str = "") -> Policy:
    """The model trained on preference pairs by TRL's `DPOTrainer`, or read, if that was done before.

    `pairs` of one kind, as `preference_pairs` returns them for `samples`. The model itself is left as it was. Training
    knows no ablation: it runs on stock attention, and is refused inside a context that ablates. Raises ValueError for
    pairs of several kinds or of other samples, RuntimeError where a reply would be lost on its way into the loss.
    """
    if acting():
        raise RuntimeError("Heads are ablated or captured here. Leave that context: training sees the stock model.")
    if hasattr(vlm.model, "peft_config"):
        raise RuntimeError("This model wears a policy already. Leave `tuned` first: training begins untrained.")
    if len(kinds := sorted(set(pairs.kind))) != 1:
        raise ValueError(f"A policy is trained on one kind of pairs, not on {', '.join(kinds) or 'none'}; select one.")
    by_id = {s.id: s for s in samples}
    if strange := sorted(set(pairs.id) - set(by_id)):
        raise ValueError(f"{len(strange)} pairs are about samples that are not in {samples!r} (first: {strange[0]}).")
    folder = store.runs_dir(vlm.profile) / "policies" / _key(vlm, samples, pairs, recipe)
    with store.held(folder):
        if not (folder / "manifest.json").exists():
            _train(vlm, by_id, pairs, recipe, folder, name or kinds[0])
        return read_policy(folder)


_TRAINERS = {name: importlib.metadata.version(name) for name in ("trl", "peft", "accelerate", "datasets")}


@functools.cache
def _code() -> str:
    """Of what decides a policy: a change elsewhere in this file trains nothing anew."""
    parts = (_train, _settings, _collator, _lent, _unchanged)
    return store.digest([PROJECTIONS, *map(inspect.getsource, parts)])


def _key(vlm: VLM, samples: Samples, pairs: pd.DataFrame, recipe: Recipe) -> str:
    """Everything that determines a policy."""
    by_id = {s.id: s for s in samples}
    rows = [[by_id[row.id].fingerprint, row.chosen, row.rejected] for row in pairs.itertuples()]
    code = [store.sample_set([], samples.origin)["code"], _code()]
    return store.digest([vlm.identity(), asdict(recipe), rows, store.versions(), *_TRAINERS.items(), *code])


def read_policy(folder: Path) -> Policy:
    """A trained policy from its folder. Raises FileNotFoundError or ValueError with the next step."""
    try:
        about = json.loads((folder / "manifest.json").read_text())
        curves = pd.DataFrame(about["curves"])
        recipe = Recipe(**about["recipe"])
        found = _weights(folder, recipe)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} holds no finished policy ({error}). Delete it and train again.") from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"The manifest in {folder} cannot be read ({error}). Delete the folder, train again."
        ) from error
    if (digest := store.digest([store.file_digest(path) for path in found])) != about["weights"]:
        raise ValueError(f"The weights in {folder} are not those of its manifest. Delete the folder and train again.")
    return Policy(folder, about["name"], recipe, curves, about | {"weights": digest})


def _weights(folder: Path, recipe: Recipe) -> list[Path]:
    found = sorted((folder / recipe.method).glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no safetensors in {folder / recipe.method}")
    return found


def _train(vlm: VLM, by_id: Mapping[str, Sample], pairs: pd.DataFrame, recipe: Recipe, folder: Path, name: str) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers.trainer_callback import PrinterCallback
    from trl import DPOTrainer

    table = Dataset.from_list([
        {"prompt": vlm.chat(s.text, s.task, True, s.context)[0], "chosen": row.chosen, "rejected": row.rejected,
         "images": [s.id]} for row in pairs.itertuples() for s in [by_id[row.id]]
    ])  # fmt: skip
    lora = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    refuse_if_too_large(vlm.name, recipe.method, _free_gb(vlm.device), recipe.rank, recipe.at_once)
    began, steps_folder = time.perf_counter(), folder / "checkpoints"
    with _quiet(), _lent(vlm, recipe) as (model, reference):
        trainer = DPOTrainer(
            model=model, ref_model=reference, args=_settings(vlm, recipe, steps_folder, len(pairs)),
            train_dataset=table, processing_class=vlm.processor, peft_config=lora if recipe.method == "lora" else None,
            data_collator=_collator(vlm, by_id), callbacks=[_progress(f"{vlm.name}: {name}, seed {recipe.seed}")],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.processing_class = vlm.tokenizer  # goes into checkpoints; a processor without a video part cannot
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        trainer.train(resume_from_checkpoint=_last(steps_folder))
        if recipe.method == "full":
            trainer.model.to(vlm.model.dtype)
        trainer.model.eval().save_pretrained(folder / recipe.method, safe_serialization=True)
        curves = _curves(trainer.state.log_history)
    weights = store.digest([store.file_digest(path) for path in _weights(folder, recipe)])
    about = store.manifest(
        name=name, model=vlm.name, revision=vlm.revision, recipe=asdict(recipe), pairs=len(pairs), weights=weights,
        trained=trained, runs=pairs.attrs.get("runs", []), curves=curves, seconds=time.perf_counter() - began,
    )  # fmt: skip
    store.write_atomic(folder / "manifest.json", json.dumps(about, indent=1) + "\n")
    shutil.rmtree(steps_folder, ignore_errors=True)  # torch's own format, and larger than the policy


@contextmanager
def _quiet() -> Iterator[None]:
    """TRL tells the Hub that somebody trains; here nobody is told, and nano needs no network. And both it and PEFT use
    names that transformers will drop one day, which is between them."""
    from huggingface_hub import constants

    told, constants.HF_HUB_DISABLE_TELEMETRY = constants.HF_HUB_DISABLE_TELEMETRY, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = told


def _free_gb(device: torch.device) -> float:
    """What training may take of a GPU: what is free, and what this process holds there, the model and PyTorch's spare
    blocks."""
    if device.type != "cuda":
        return math.inf
    return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / 1e9


def _settings(vlm: VLM, recipe: Recipe, folder: Path, pairs: int):
    from trl import DPOConfig

    cuda = vlm.device.type == "cuda"
    steps = -(-pairs // recipe.batch_size) * recipe.epochs
    return DPOConfig(
        output_dir=str(folder), loss_type=["sigmoid" if recipe.loss == "dpo" else "sft"], beta=recipe.beta,
        learning_rate=recipe.learning_rate, num_train_epochs=recipe.epochs, seed=recipe.seed, data_seed=recipe.seed,
        per_device_train_batch_size=recipe.at_once,
        gradient_accumulation_steps=recipe.batch_size // recipe.at_once,
        max_length=None,  # the default, 1024, cuts replies away behind a picture of a thousand tokens, without a word
        lr_scheduler_type="linear", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch",
        bf16=cuda and vlm.model.dtype == torch.bfloat16, use_cpu=not cuda, gradient_checkpointing=cuda,
        remove_unused_columns=False, report_to="none", disable_tqdm=True, logging_steps=1, logging_strategy="steps",
        save_strategy="steps", save_steps=max(1, round(steps / 10)), save_total_limit=1,
    )  # fmt: skip


def _collator(vlm: VLM, by_id: Mapping[str, Sample]):
    """TRL's collator, which reads each pair's picture when it is needed, and makes sure that no reply is lost."""
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

    class Pictures(DataCollatorForVisionPreference):
        def torch_call(self, examples: list[dict]) -> dict:
            with_pictures = [e | {"images": [by_id[e["images"][0]].image.convert("RGB")]} for e in examples]
            batch = super().torch_call(with_pictures)
            if (batch["completion_mask"].sum(1) == 0).any():
                raise RuntimeError(
                    f"A reply of {examples[0]['images'][0]} (or of a pair beside it) has no token in the batch: it was "
                    "empty or cut off, and would train nothing, silently. Keep max_length=None; draw no empty replies."
                )
            return batch

    return Pictures(vlm.processor)


@contextmanager
def _lent(vlm: VLM, recipe: Recipe) -> Iterator[tuple]:
    """The model to train and its reference, for TRL to change; afterwards `vlm.model` is as it was.

    LoRA trains adapters inside `vlm.model`, whose reference is itself with the adapters off. A full recipe trains a
    copy in float32, where a step of 2e-7 is not rounded away, with `vlm.model` as the reference.
    """
    model, text = vlm.model, vlm.model.config.get_text_config()
    attention, configs = text._attn_implementation, (model.config, text, model.generation_config)
    before = [dict(vars(config)) for config in configs]  # TRL sets pad_token_id there, the Trainer use_cache
    with _unchanged(model):
        if vlm.device.type == "cpu":  # the backward pass of SDPA is slow there
            model.set_attn_implementation({"text_config": "eager"})
        try:
            yield (model, None) if recipe.method == "lora" else (deepcopy(model).float(), model)
        finally:
            for name in ("forward", "_original_forward", "model_tags"):  # TRL's fused head, Accelerate's casts
                model.__dict__.pop(name, None)
            model.gradient_checkpointing_disable()
            if getattr(model, "_require_grads_hooks", None):
                model.disable_input_require_grads()
            model.set_attn_implementation({"text_config": attention})
            for config, values in zip(configs, before):
                vars(config).clear()
                vars(config).update(values)


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Whatever PEFT puts into a model is taken out again, also where TRL gave up halfway, and its freezing undone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        yield
    finally:
        for name, module in list(model.named_modules()):
            if isinstance(module, BaseTunerLayer):
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, module.get_base_layer())
        model.__dict__.pop("peft_config", None)
        for name, p in model.named_parameters():
            p.requires_grad_(wanted[name])
            p.grad = None
        model.eval()


def _last(folder: Path) -> str | None:
    """The last checkpoint that was written to its end (the trainer's state is written last)."""
    whole = [p.parent for p in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda p: int(p.name.split("-")[1]))) if whole else None


def _curves(history: list[dict]) -> list[dict]:
    names = {"loss": "loss", "rewards/margins": "margin", "rewards/accuracies": "accuracy"}
    lines = [line | {"rewards/accuracies": 100 * line["rewards/accuracies"]} for line in history if "loss" in line]
    return [{"step": line["step"], **{ours: line[theirs] for theirs, ours in names.items()}} for line in lines]


def _progress(label: str):
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        said = time.monotonic()

        def on_log(self, args, state, control, logs=None, **more):
            if "loss" in (logs or {}) and (time.monotonic() - self.said > 10 or state.global_step == state.max_steps):
                self.said = time.monotonic()
                print(f"{label}  step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}", flush=True)

    return Progress()


@contextmanager
def tuned(vlm: VLM, policy: Policy) -> Iterator[VLM]:
    """The model with a policy's weights; on leaving, `vlm` is the untrained model again.

    The policy's digest is part of `revision`, so nothing that it replies is ever taken for the untrained model's.
    Raises ValueError for a policy that was trained from another model, or from another revision of it.
    """
    if (begun := (policy.about["model"], policy.about["revision"])) != (vlm.name, vlm.revision):
        raise ValueError(
            f"The policy in {policy.folder} was trained from {begun[0]} at {begun[1][:16]}, and this is {vlm.name} at "
            f"{vlm.revision[:16]}. Load that model, or train a policy for this one."
        )
    untrained, revision = vlm.revision, f"{vlm.revision}+{policy.digest}"
    if policy.recipe.method == "full":
        yield replace(vlm, model=_full(vlm, policy), revision=revision)
        return
    from peft import PeftModel

    with _unchanged(vlm.model):
        vlm.revision = revision  # the adapters are in its model, too: whoever asks it in here asks the policy
        try:
            with _quiet():
                PeftModel.from_pretrained(vlm.model, policy.folder / "lora", is_trainable=False)
            yield replace(vlm)
        finally:
            vlm.revision = untrained


def _full(vlm: VLM, policy: Policy) -> torch.nn.Module:
    model = type(vlm.model).from_pretrained(
        policy.folder / "full", dtype=vlm.model.dtype, attn_implementation="sdpa", use_safetensors=True
    )
    return model.to(vlm.device).eval()


# ---------------------------------------------------------------- what it gained

UNTRAINED = "untrained"
MEAN = "mean of benchmarks"


def gains(answers: pd.DataFrame) -> pd.DataFrame:
    """What training gained (Figure A3), points of accuracy against the untrained model on the same samples.

    `answers`: replies (`evaluate.replies`) with condition `untrained` or a policy's, and its seed. A row per benchmark,
    and for their unweighted mean, condition and seed, and one without seed for the mean over seeds: benchmark,
    condition, seed, gain, low, high (of a mean: 95 % paired bootstrap over pictures, each sample's replies averaged
    over seeds; NaN for single seeds), seeds, seeds_low, seeds_high (95 % t interval over seeds, of a mean of two or
    more), unmasked (accuracy of the untrained model, percent), n.
    """
    rows, conditions = [], [c for c in dict.fromkeys(answers.condition) if c != UNTRAINED]
    for benchmark, own in [*answers.groupby("benchmark", sort=False), (MEAN, answers)]:
        base = _right(own, UNTRAINED)
        for condition in conditions:
            found = _difference(own, condition, UNTRAINED)
            common = {"benchmark": benchmark, "condition": condition, "n": found["n"], "seeds": found["seeds"],
                      "unmasked": 100 * _weighted(base).mean()}  # fmt: skip
            rows += [common | {"seed": seed, "gain": value} for seed, value in found["by_seed"].items()]
            rows.append(common | {"gain": found["difference"], **{c: found[c] for c in _INTERVALS}})
    columns = ["benchmark", "condition", "seed", "gain", *_INTERVALS, "seeds", "unmasked", "n"]
    table = pd.DataFrame(rows).reindex(columns=columns).astype({"seed": "Int64"})
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


_INTERVALS = ["low", "high", "seeds_low", "seeds_high"]


def differences(answers: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """By how much condition a is better than b, mean over benchmarks and seeds (paired by sample and, where both have
    seeds, by seed): a, b, difference (points), low, high, seeds_low, seeds_high as in `gains`, seeds, n."""
    rows = [{"a": a, "b": b, **_difference(answers, a, b)} for a, b in pairs]
    table = pd.DataFrame(rows).drop(columns="by_seed")
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


def _right(answers: pd.DataFrame, condition: str) -> pd.DataFrame:
    """Whether replies are right, bool: a row per benchmark, picture and sample, a column per seed (-1 without one)."""
    own = answers[answers.condition == condition]
    if own.empty:
        raise ValueError(f"No replies under {condition!r}; there are {', '.join(dict.fromkeys(answers.condition))}.")
    known = own.assign(right=own.outcome == "correct", seed=own.seed.fillna(-1).astype(int))
    return known.pivot(index=["benchmark", "image", "id"], columns="seed", values="right")


def _weighted(right: pd.DataFrame) -> pd.Series:
    """Mean over seeds of every sample, weighted so that the mean over samples is that over benchmarks."""
    sizes = right.groupby("benchmark", sort=False).size()
    weight = len(right) / (len(sizes) * sizes)
    return right.astype(float).mean(axis=1) * right.index.get_level_values("benchmark").map(weight)


def _difference(answers: pd.DataFrame, a: str, b: str) -> dict:
    one, other = _right(answers, a), _right(answers, b)
    if set(one.index) != set(other.index) or one.isna().any(axis=None) or other.isna().any(axis=None):
        raise ValueError(f"{a} and {b} did not reply to the same samples under every seed: measure what is missing.")
    other = other.loc[one.index]
    images = one.index.get_level_values("image").tolist()
    found = paired_difference(_weighted(one).tolist(), _weighted(other).tolist(), images)
    by_seed = {
        seed: 100 * float((_weighted(one[[seed]]) - _weighted(other[[seed]] if seed in other else other)).mean())
        for seed in one
    }
    spread = over_seeds(list(by_seed.values())) if len(by_seed) > 1 else None
    return {
        "difference": found.mean, "low": found.low, "high": found.high, "n": found.n, "seeds": len(by_seed),
        "seeds_low": spread.low if spread else np.nan, "seeds_high": spread.high if spread else np.nan,
        "by_seed": by_seed,
    }  # fmt: skip
