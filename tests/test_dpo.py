"""Pairs and training against oracles: hooks, hand-made draws, exact token ids, weights before and after, loops.

Every trap of TRL and PEFT that the module avoids has a test that shows the trap, too: should a later version mend it,
the test says so.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from scipy.stats import chisquare
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from tests import tiny
from tests.test_attention import hooked, zeroing
from vrhlib import Ablation, dpo, store
from vrhlib.attention import ablate, generate
from vrhlib.boxes import Box
from vrhlib.heads import Head, HeadSet
from vrhlib.samples import Samples
from vrhlib.training import Recipe
from vrhlib.wiring import load_vlm

pytestmark = pytest.mark.usefixtures("root")
CUT = HeadSet((Head(0, 1), Head(1, 5), Head(1, 0), Head(2, 7)), (3, 8), "cut")
QUICK = Recipe(learning_rate=5e-3, epochs=1, batch_size=2, at_once=2, rank=4)


@pytest.fixture
def one(tiny_models):
    """One class is enough where nothing depends on it."""
    from copy import copy

    vlm = copy(tiny_models["internvl3.5"])
    vlm.max_new_tokens = 6
    return vlm


def some(n: int = 6) -> Samples:
    sizes = [(100, 60), (70, 150), (130, 70), (64, 64), (90, 120), (56, 112), (140, 70), (80, 80)]
    return Samples("noise", "train", tiny.samples(*sizes[:n]))


def drawn(vlm, samples, **how) -> pd.DataFrame:
    return dpo.preference_pairs(vlm, samples, {"vrh": Ablation(CUT), "random": dpo.RandomHeads(CUT)}, **how)


# ---------------------------------------------------------------- sampling


def test_draws_follow_the_softmax_at_the_temperature(one):
    """Frequencies of the first token over 1,500 seeds against probabilities from a plain forward pass."""
    batch, temperature, draws = one.prepare(tiny.samples()[:1]), 1.7, 1500
    with torch.no_grad():
        logits = one.model(**one.inputs(batch)).logits[0, -1].float().clone()
    logits[one.model.generation_config.suppress_tokens] = -torch.inf
    expected = (logits / temperature).double().softmax(-1).numpy()
    counts = np.zeros(len(expected))
    for start in range(0, draws, 500):
        ids = generate(one, batch, [None] * 500, 1, temperature, [range(start, start + 500)])
        counts += np.bincount(ids[0, :, 0], minlength=len(expected))
    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    assert common.sum() > 10 and chisquare(observed, wanted / wanted.sum() * draws).pvalue > 1e-3
    at_one = logits.double().softmax(-1).numpy()
    told = np.append(at_one[common], at_one[~common].sum())
    assert chisquare(observed, told / told.sum() * draws).pvalue < 1e-6, "another temperature is told apart"


def test_a_draw_depends_on_its_own_seed_and_on_nothing_else_in_the_batch(vlm, batch):
    together = generate(vlm, batch, [None, Ablation(CUT)], 6, 1.0, [[1, 2], [3, 4], [5, 6]])
    for i, sample in enumerate(batch.samples):
        alone = vlm.prepare([sample])
        for j, cut in enumerate((None, Ablation(CUT))):
            own = generate(vlm, alone, [cut], 6, 1.0, [[2 * i + j + 1]])[0, 0]
            length = min(len(own), together.shape[2])
            assert own[:length].tolist() == together[i, j, :length].tolist()
    other = generate(vlm, batch, [None, Ablation(CUT)], 6, 1.0, [[1, 2], [3, 4], [7, 6]])
    assert (other[:2] == together[:2, :, : other.shape[2]]).all() and (other[2, 0] != together[2, 0]).any()


def test_almost_no_temperature_is_greedy_and_none_at_all_is_refused(one):
    batch = one.prepare(tiny.samples())
    greedy, cold = generate(one, batch, max_new_tokens=5), generate(one, batch, [None], 5, 1e-4, [[0], [1], [2]])
    assert greedy.tolist() == cold.tolist()
    for temperature in (0, -1.0):
        with pytest.raises(ValueError, match="greedy replies need no sampling"):
            generate(one, batch, [None], 5, temperature, [[0], [1], [2]])


def by_hand(vlm, sample, temperature: float, seed: int, cut: HeadSet | None) -> list[int]:
    """A reply token by token from whole passes over pixels, heads cut by a hook, noise drawn as documented."""
    tensors = vlm.prepare([sample]).tensors
    found: list[int] = []
    for step in range(vlm.max_new_tokens):
        ids = torch.cat([tensors["input_ids"], torch.tensor([found], dtype=torch.long)], 1)
        more = {"attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in tensors:
            kinds = torch.zeros_like(ids)
            kinds[:, : tensors["mm_token_type_ids"].shape[1]] = tensors["mm_token_type_ids"]
            more["mm_token_type_ids"] = kinds
        with torch.no_grad(), hooked(vlm, zeroing(cut) if cut else lambda i, x: None):
            logits = vlm.model(**(tensors | more | {"input_ids": ids})).logits[0, -1].float()
        logits[vlm.model.generation_config.suppress_tokens] = -torch.inf
        generator = torch.Generator().manual_seed(int(store.digest([seed, step])[:15], 16))
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        found.append(int((logits / temperature + noise).argmax()))
        if found[-1] in vlm.stop_ids:
            break
    return found


def test_heads_are_cut_while_rejected_replies_are_sampled_and_whole_while_chosen_ones_are(vlm):
    """Two-sided: with the hook the rejected replies come out by hand, without it the chosen ones, and they differ."""
    samples = some(3)
    pairs = dpo.preference_pairs(vlm, samples, {"vrh": Ablation(CUT)}, 0.8, seed=4)
    for row, sample in zip(pairs.itertuples(), samples):
        for side, text, cut in (("chosen", row.chosen, None), ("rejected", row.rejected, CUT)):
            seed = int(store.digest([4, sample.fingerprint, side])[:15], 16)
            ids = by_hand(vlm, sample, 0.8, seed, cut)
            assert text == vlm.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert ids != by_hand(vlm, sample, 0.8, seed, None if cut else CUT), "or the cut could not be seen"


def test_each_sample_may_have_conditions_of_its_own(vlm, batch):
    cuts = [[None, Ablation(CUT.top(1))], [Ablation(CUT), None], [Ablation(CUT.top(2)), Ablation(CUT.rest().top(3))]]
    found = generate(vlm, batch, cuts, 5)
    for j in range(2):
        for i, own in enumerate(cuts):
            same = generate(vlm, batch, [own[j]], 5)[i, 0]
            length = min(len(same), found.shape[2])
            assert found[i, j, :length].tolist() == same[:length].tolist()


# ---------------------------------------------------------------- random heads


def test_random_heads_are_new_for_every_sample_and_never_of_the_first_layer_or_of_the_set():
    samples, draw = some(8), dpo.RandomHeads(CUT, seed=3)
    sets = [draw.of(s).heads for s in samples]
    assert all(len(s) == len(CUT) and not s.overlap(CUT) and s.layers[0] == 0 for s in sets)
    assert len({frozenset(s) for s in sets}) > 5
    assert [draw.of(s).heads.heads for s in samples] == [s.heads for s in sets]
    assert [dpo.RandomHeads(CUT, seed=4).of(s).heads.heads for s in samples] != [s.heads for s in sets]
    free = dpo.RandomHeads(CUT, skip_layers=())
    assert sum(free.of(s).heads.layers[0] for s in samples) > 0, "the first layer is left out on purpose"
    assert draw.describe(samples) != dpo.RandomHeads(CUT, seed=4).describe(samples)
    with pytest.raises(ValueError, match="and layers \\[0, 1, 2\\]. Use a smaller k"):
        dpo.RandomHeads(CUT, skip_layers=(0, 1, 2)).of(samples[0])


# ---------------------------------------------------------------- pairs


def test_pairs_are_the_same_again_and_others_under_another_seed_or_temperature(one, monkeypatch):
    first = drawn(one, some(), seed=1, batch_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(dpo, "generate", None)  # stored: nothing is drawn again
        pd.testing.assert_frame_equal(drawn(one, some(), seed=1, batch_size=4), first)
    monkeypatch.setattr(store, "ROOT", store.ROOT / "elsewhere")
    pd.testing.assert_frame_equal(drawn(one, some(), seed=1, batch_size=4), first)
    assert drawn(one, some(), seed=2, batch_size=4).chosen.tolist() != first.chosen.tolist()
    assert drawn(one, some(), seed=1, temperature=0.3, batch_size=4).chosen.tolist() != first.chosen.tolist()


@pytest.mark.parametrize("batches", [1, 2])
def test_pairs_go_on_where_they_were_interrupted_with_the_same_draws(one, monkeypatch, batches):
    whole = drawn(one, some(), batch_size=2)
    monkeypatch.setattr(store, "ROOT", store.ROOT / "again")
    calls = []

    def killed(*args):
        if len(calls) == batches:
            raise KeyboardInterrupt
        calls.append(args)
        return generate(*args)

    monkeypatch.setattr(dpo, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        drawn(one, some(), batch_size=2)
    monkeypatch.setattr(dpo, "generate", lambda *args: calls.append(args) or generate(*args))
    pd.testing.assert_frame_equal(drawn(one, some(), batch_size=2), whole)
    assert len(calls) == 3, "what was stored is not drawn again"


def test_a_pair_says_what_it_is(one):
    samples = some(4)
    pairs = drawn(one, samples)
    assert pairs.kind.tolist() == ["vrh"] * 4 + ["random"] * 4 and pairs.id.tolist() == 2 * [s.id for s in samples]
    assert pairs.chosen.tolist()[:4] == pairs.chosen.tolist()[4:], "kinds share the chosen replies"
    assert len(pairs.attrs["runs"]) == 3
    assert (pairs.equal == (pairs.chosen == pairs.rejected)).all()
    assert (pairs.chosen_iou == 0).all() and pairs.chosen_box.isna().all(), "a random model writes no box"
    assert dpo.boxes(pairs, samples[0].id) == {"unmasked": None, "vrh": None, "random": None}
    with pytest.raises(ValueError, match="No pair is about 'nobody'"):
        dpo.boxes(pairs, "nobody")
    with pytest.raises(ValueError, match="cannot be called 'chosen'"):
        dpo.preference_pairs(one, samples, {"chosen": Ablation(CUT)})


def a_pair(kind="vrh", chosen_iou=0.9, rejected_iou=0.1, equal=False, **more) -> dict:
    return {"id": "a", "kind": kind, "chosen_iou": chosen_iou, "rejected_iou": rejected_iou, "equal": equal,
            "worse": chosen_iou < rejected_iou, "retokenised": False, "chosen_box": Box(0, 0, 1, 1),
            "rejected_box": None, **more}  # fmt: skip


def test_pairs_are_counted_and_kept_by_the_stated_rule():
    pairs = pd.DataFrame([
        a_pair(), a_pair(chosen_iou=0.2, rejected_iou=0.7), a_pair(chosen_iou=0.8, rejected_iou=0.8, equal=True),
        a_pair(chosen_iou=0.6, rejected_iou=0.6), a_pair("random", 0.7, 0.2, retokenised=True),
    ])  # fmt: skip
    table = dpo.counts(pairs).set_index("kind")
    assert table.loc["vrh"].to_dict() == {
        "pairs": 4, "equal": 1, "worse": 1, "better": 1, "chosen_right": 3, "rejected_right": 3, "retokenised": 0,
        "kept": 4,
    }  # fmt: skip
    assert table.loc["random"].tolist() == [1, 0, 0, 1, 1, 0, 1, 1]
    assert dpo.counts(pairs, "different").kept.tolist() == [3, 1]
    assert dpo.kept(pairs, "better").chosen_iou.tolist() == [0.9, 0.7]
    with pytest.raises(ValueError, match="Did you mean 'different'"):
        dpo.kept(pairs, "diferent")
    with pytest.raises(ValueError, match="keeps no pair of random"):
        dpo.kept(pairs.assign(equal=pairs.kind == "random"), "different")


# ---------------------------------------------------------------- what TRL is given, and its traps


def batch_of(vlm, samples, pairs, monkeypatch) -> tuple[dict, dict]:
    """The first batch that the trainer computes a loss on, and what else held at that moment."""
    from trl import DPOTrainer

    seen: dict = {}

    def spy(self, model, inputs, *args, **kwargs):
        seen.setdefault("batch", {k: v.clone() for k, v in inputs.items()})
        seen.setdefault("attention", vlm.model.config.get_text_config()._attn_implementation)
        seen.setdefault("acting", dpo.acting())
        seen.setdefault("args", self.args)
        return original(self, model, inputs, *args, **kwargs)

    original = DPOTrainer.compute_loss
    monkeypatch.setattr(DPOTrainer, "compute_loss", spy)
    recipe = replace(QUICK, batch_size=len(pairs), at_once=len(pairs))
    dpo.train(vlm, samples, pairs, recipe)
    return seen["batch"], seen


def test_training_reads_exactly_the_prompts_and_replies_that_were_sampled(vlm, monkeypatch):
    """Token by token: prompts as `prepare` makes them, replies with the stop token that TRL would not add."""
    samples = some(3)
    pairs = dpo.preference_pairs(vlm, samples, {"vrh": Ablation(CUT)})
    batch, seen = batch_of(vlm, samples, pairs, monkeypatch)
    assert not seen["acting"] and seen["attention"] in ("eager", "sdpa"), "no ablation, stock attention"
    got = {}
    for ids, mask, done in zip(batch["input_ids"], batch["attention_mask"], batch["completion_mask"]):
        prompt, reply = ids[(mask == 1) & (done == 0)].tolist(), ids[done == 1].tolist()
        got[tuple(reply)] = prompt
    for sample, row in zip(samples, pairs.itertuples()):
        prepared = vlm.prepare([sample]).tensors
        for side, cut in (("chosen", None), ("rejected", CUT)):
            seed = int(store.digest([0, sample.fingerprint, side])[:15], 16)
            ids = by_hand(vlm, sample, 1.0, seed, cut)
            if not row.retokenised:
                assert got[tuple(ids)] == prepared["input_ids"][0].tolist()
    pixels = [vlm.prepare([s]).tensors["pixel_values"] for s in samples]
    assert batch["pixel_values"].numel() == 2 * sum(p.numel() for p in pixels)
    total = torch.cat([p.flatten() for p in pixels]).sum()
    assert math.isclose(float(batch["pixel_values"].sum()), 2 * float(total), rel_tol=1e-4, abs_tol=1e-2)


def test_trap_a_short_max_length_loses_replies_in_silence_and_ours_does_not(one, monkeypatch):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    examples = [
        {"prompt": one.chat(s.text)[0], "chosen": r.chosen, "rejected": r.rejected, "images": [s.image]}
        for s, r in zip(samples, pairs.itertuples())
    ]
    prompts = one.prepare(list(samples)).tensors["attention_mask"].sum(1)
    cut = DataCollatorForVisionPreference(one.processor, max_length=int(prompts.min()))
    assert (cut([dict(e) for e in examples])["completion_mask"].sum(1) == 0).any(), "the trap is still there"
    collate = dpo._collator(one, {s.id: s for s in samples})
    ours = [e | {"images": [s.id]} for e, s in zip(examples, samples)]
    assert (collate([dict(e) for e in ours])["completion_mask"].sum(1) > 0).all()
    collate.max_length = int(prompts.min())
    with pytest.raises(RuntimeError, match="has no token in the batch.*max_length=None"):
        collate([dict(e) for e in ours])
    assert dpo._settings(one, QUICK, store.ROOT, 8).max_length is None


def test_an_empty_reply_is_refused_where_it_would_train_nothing(one):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)}).assign(rejected="")
    with pytest.raises(RuntimeError, match="empty or cut off"):
        dpo.train(one, samples, pairs, QUICK)


def adapted(vlm, target) -> list[str]:
    """Names of the modules that get an adapter, counted on a copy."""
    from copy import deepcopy

    model = get_peft_model(deepcopy(vlm.model), LoraConfig(r=2, target_modules=target))
    return sorted({name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name})


def test_trap_names_alone_adapt_the_vision_tower_and_our_pattern_does_not(vlm):
    found = adapted(vlm, dpo.PROJECTIONS)
    assert len(found) == 4 * vlm.grid[0] and all("language_model" in name for name in found)
    if "Qwen" not in vlm.image_backend and "Qwen" not in type(vlm.model).__name__:
        assert any("vision_tower" in name for name in adapted(vlm, ["q_proj", "v_proj"])), "the trap is still there"
    assert any("language_model" not in name for name in adapted(vlm, "all-linear"))


def test_trap_an_adapter_on_the_head_is_refused_by_trl(one, monkeypatch):
    monkeypatch.setattr(dpo, "PROJECTIONS", ["lm_head"])
    pairs = dpo.preference_pairs(one, some(2), {"vrh": Ablation(CUT)})
    with pytest.raises(ValueError, match="lm_head"):
        dpo.train(one, some(2), pairs, QUICK)
    assert one.model.training is False and "forward" not in one.model.__dict__, "also after an error"


def test_trap_settings_that_trl_chooses_otherwise(one):
    from trl import DPOConfig

    ours, theirs = dpo._settings(one, QUICK, store.ROOT, 8), DPOConfig(output_dir=str(store.ROOT), use_cpu=True)
    assert theirs.max_length == 1024 and theirs.learning_rate == 1e-6, "the traps are still there"
    assert not ours.bf16 and not ours.fp16 and ours.use_cpu and ours.learning_rate == QUICK.learning_rate
    assert not ours.precompute_ref_log_probs and ours.truncation_mode == "keep_start", "the others raise with pictures"
    assert ours.report_to == [] and ours.seed == ours.data_seed == QUICK.seed
    assert ours.per_device_train_batch_size * ours.gradient_accumulation_steps == QUICK.batch_size


def test_trap_the_reference_is_the_untrained_model(one, monkeypatch):
    """After training, with the adapter off, replies are as likely as they were: no second model is needed."""
    told, original = [], dpo._curves
    monkeypatch.setattr(dpo, "_curves", lambda history: told.extend(history) or original(history))
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    recipe = replace(QUICK, epochs=4, learning_rate=5e-2)
    dpo.train(one, samples, pairs, recipe)
    known = [(line["logps/chosen"], line["rewards/chosen"]) for line in told if "loss" in line]
    references = [said - reward / recipe.beta for said, reward in known]  # of the chosen replies, mean over the batch
    assert len(known) == 4 and abs(known[-1][0] - known[0][0]) > 0.5, "the policy moved"
    assert max(references) - min(references) < 1e-2, "and what it is compared with did not"


def test_trap_several_gpus_without_a_launcher_are_refused(one, monkeypatch):
    from transformers import TrainingArguments

    pairs = dpo.preference_pairs(one, some(2), {"vrh": Ablation(CUT)})
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match="accelerate launch|CUDA_VISIBLE_DEVICES"):
        dpo.train(one, some(2), pairs, QUICK)


# ---------------------------------------------------------------- training


def logits(vlm, sample=None) -> torch.Tensor:
    batch = vlm.prepare([sample or tiny.samples()[0]])
    with torch.inference_mode():
        return vlm.model(**vlm.inputs(batch)).logits[0, -1].clone()


def state(vlm) -> dict:
    return {name: value.clone() for name, value in vlm.model.state_dict().items()}


def furthest(a: dpo.Policy, b: dpo.Policy) -> float:
    """The largest difference between two adapters."""
    one, other = (load_file(next((p.folder / "lora").glob("*.safetensors"))) for p in (a, b))
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_policy_reloads_to_identical_logits_and_the_model_is_left_as_it_was(vlm, monkeypatch, method, tmp_path):
    """The trained model's logits, taken when it is saved, come back from its files."""
    from transformers import PreTrainedModel

    samples, before, plain, untrained = some(4), state(vlm), logits(vlm), vlm.identity()
    configs = [json.dumps(c.to_dict(), default=str) for c in (vlm.model.config, vlm.model.generation_config)]
    pairs = dpo.preference_pairs(vlm, samples, {"vrh": Ablation(CUT)})
    trained = []

    def spy(self, folder, *args, **kwargs):
        if str(folder).endswith(f"/{method}"):
            self.set_attn_implementation({"text_config": "sdpa"})
            trained.append(logits(replace(vlm, model=self.get_base_model() if method == "lora" else self)))
        return original(self, folder, *args, **kwargs)

    from peft import PeftModel

    owner = PeftModel if method == "lora" else PreTrainedModel
    original = owner.save_pretrained
    monkeypatch.setattr(owner, "save_pretrained", spy)
    policy = dpo.train(vlm, samples, pairs, replace(QUICK, method=method), "a policy")
    assert (trained[0] - plain).abs().max() > 1e-3, "it learned something"
    assert torch.equal(logits(vlm), plain) and all(torch.equal(v, before[n]) for n, v in state(vlm).items())
    assert configs == [json.dumps(c.to_dict(), default=str) for c in (vlm.model.config, vlm.model.generation_config)]
    assert before.keys() == state(vlm).keys() and all(p.requires_grad for p in vlm.model.parameters())
    for again in (policy, dpo.read_policy(policy.folder)):
        with dpo.tuned(vlm, again) as loaded:
            assert torch.equal(logits(loaded), trained[0])
            assert loaded.name == vlm.name and loaded.identity() != untrained, "its replies are stored apart"
        assert torch.equal(logits(vlm), plain) and all(p.requires_grad for p in vlm.model.parameters())
        assert vlm.identity() == untrained
    files = {path.suffix for path in policy.folder.rglob("*") if path.is_file()}
    assert ".safetensors" in files and not files & {".bin", ".pt", ".pth", ".pkl"}
    about = json.loads((policy.folder / "manifest.json").read_text())
    assert about["pairs"] == 4 and about["recipe"]["method"] == method and about["name"] == "a policy"


def test_an_adapter_is_what_its_file_says(one):
    """Oracle: the scaled product of the two matrices in the file, added to the weights by hand."""
    samples = some(4)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    policy = dpo.train(one, samples, pairs, QUICK)
    (file,) = (policy.folder / "lora").glob("*.safetensors")
    parts, weights = load_file(file), dict(one.model.named_parameters())
    before = state(one)
    try:
        with torch.no_grad():
            for name, a in parts.items():
                if name.endswith("lora_A.weight"):
                    b = parts[name.replace("lora_A", "lora_B")]
                    target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                    weights[target] += QUICK.alpha / QUICK.rank * (b @ a)
        by_hand_logits = logits(one)
    finally:
        one.model.load_state_dict(before)
    with dpo.tuned(one, policy) as loaded:
        torch.testing.assert_close(logits(loaded), by_hand_logits, atol=1e-4, rtol=1e-4)
    assert len(parts) == 2 * 4 * one.grid[0] and policy.about["trained"] == sum(p.numel() for p in parts.values())


def test_training_is_the_same_again_and_depends_on_its_seed(one, monkeypatch):
    samples = some(4)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    first = dpo.train(one, samples, pairs, QUICK)
    stored = dpo.train(one, samples, pairs, QUICK)
    assert stored.digest == first.digest and stored.about["written"] == first.about["written"], "read, not trained"
    monkeypatch.setattr(store, "ROOT", store.ROOT / "elsewhere")
    assert dpo.train(one, samples, pairs, QUICK).digest == first.digest
    assert dpo.train(one, samples, pairs, replace(QUICK, seed=1)).digest != first.digest


def test_an_interrupted_training_goes_on_to_the_same_policy(one, monkeypatch):
    samples = some(8)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    recipe = replace(QUICK, epochs=2)  # eight steps, a checkpoint at each
    whole = dpo.train(one, samples, pairs, recipe)
    monkeypatch.setattr(store, "ROOT", store.ROOT / "again")
    plain, steps = state(one), []

    from trl import DPOTrainer

    original = DPOTrainer.compute_loss

    def killed(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(DPOTrainer, "compute_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        dpo.train(one, samples, pairs, recipe)
    assert all(torch.equal(v, plain[n]) for n, v in state(one).items()), "and the model is whole again"
    resumed = dpo.train(one, samples, pairs, recipe)
    assert steps[6:] == [5, 6, 7], "only the missing steps"
    assert resumed.curves.to_dict() == whole.curves.to_dict()
    assert resumed.digest == whole.digest
    assert not (resumed.folder / "checkpoints").exists()


def test_a_checkpoint_that_was_not_finished_is_not_resumed(tmp_path):
    for step, whole in ((3, True), (10, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert dpo._last(tmp_path) == str(tmp_path / "checkpoint-10") and dpo._last(tmp_path / "none") is None


def test_fine_tuning_reads_the_chosen_replies_alone_and_dpo_both(one):
    samples = some(4)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    others = pairs.assign(rejected="nothing of the kind<|im_end|>")
    recipes = {loss: replace(QUICK, loss=loss) for loss in ("sft", "dpo")}
    by_loss = {loss: [dpo.train(one, samples, p, own) for p in (pairs, others)] for loss, own in recipes.items()}
    apart = {loss: furthest(*policies) for loss, policies in by_loss.items()}
    assert apart["sft"] < 1e-4 and apart["dpo"] > 1e-3, "padding alone moves the last digits"
    curves = by_loss["dpo"][0].curves
    assert math.isclose(curves.loss[0], math.log(2), rel_tol=1e-4) and abs(curves.margin[0]) < 1e-4
    assert list(curves) == ["step", "loss", "margin", "accuracy"] and curves.step.tolist() == [1, 2]


def test_dpo_raises_the_margin_of_its_pairs(one):
    samples = some(6)
    pairs = dpo.kept(dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)}), "different")
    curves = dpo.train(one, samples, pairs, replace(QUICK, epochs=6, batch_size=len(pairs), at_once=len(pairs))).curves
    assert curves.loss.iloc[-1] < curves.loss.iloc[0] - 0.05 and curves.margin.iloc[-1] > 0.1
    assert curves.accuracy.iloc[-1] == 100


def test_training_is_refused_where_heads_are_cut(one):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    with ablate(one, Ablation(CUT)):
        with pytest.raises(RuntimeError, match="training sees the stock model"):
            dpo.train(one, samples, pairs, QUICK)
        logits(one)  # the context wants to be used
    assert not dpo.acting()


def test_a_recipe_that_does_not_fit_the_card_is_refused_before_it_begins(one, monkeypatch):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    real = replace(one, name="qwen2.5-vl-7b")
    free = dpo._free_gb
    monkeypatch.setattr(dpo, "_free_gb", lambda device: 48.0)
    with pytest.raises(MemoryError, match="needs .* GB of GPU memory, and 48.0 GB are free.*lora"):
        dpo.train(real, samples, pairs, replace(QUICK, method="full"))
    assert dpo.train(real, samples, pairs, QUICK).recipe == QUICK
    assert free(torch.device("cpu")) == math.inf


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda p: pd.concat([p, p.assign(kind="random")]), "one kind of pairs, not on random, vrh"),
        (lambda p: p.assign(id=["noise-0", "noise-99"]), "1 pairs are about samples that are not in noise train"),
        (lambda p: p.iloc[:0], "one kind of pairs, not on none"),
    ],
)
def test_pairs_that_cannot_be_meant_are_refused(one, spoil, message):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    with pytest.raises(ValueError, match=message):
        dpo.train(one, samples, spoil(pairs), QUICK)


def test_a_policy_with_a_broken_manifest_or_other_weights_is_named(one):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    policy = dpo.train(one, samples, pairs, QUICK)
    (file,) = (policy.folder / "lora").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="not those of its manifest. Delete the folder"):
        dpo.read_policy(policy.folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="holds no finished policy"):
        dpo.read_policy(policy.folder)
    (policy.folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        dpo.read_policy(policy.folder)


def test_a_policy_is_worn_by_its_own_model_and_one_at_a_time(one):
    samples = some(2)
    pairs = dpo.preference_pairs(one, samples, {"vrh": Ablation(CUT)})
    policy, plain = dpo.train(one, samples, pairs, QUICK), logits(one)
    for other in (replace(one, revision="another"), replace(one, name="another")):
        with pytest.raises(ValueError, match="was trained from .* Load that model, or train"), dpo.tuned(other, policy):
            pass
    with dpo.tuned(one, policy) as trained:
        with pytest.raises(ValueError, match="was trained from"), dpo.tuned(trained, policy):
            pass
        with pytest.raises(RuntimeError, match="Leave `tuned` first"):
            dpo.train(one, samples, pairs, replace(QUICK, seed=9))
        assert not torch.equal(logits(trained), plain)
        assert torch.equal(logits(one), logits(trained)) and one.identity() == trained.identity(), (
            "one model: what it replies now is nowhere taken for the untrained model's"
        )
    assert torch.equal(logits(one), plain) and "+" not in one.revision


@pytest.mark.parametrize("change", ["recipe", "reply", "sample", "model", "training code", "reading code"])
def test_whatever_determines_a_policy_is_in_its_key(one, change, monkeypatch):
    samples = some(2)
    pairs = pd.DataFrame([{"id": s.id, "chosen": "a", "rejected": "b"} for s in samples])
    key = dpo._key(one, samples, pairs, QUICK)
    assert key == dpo._key(one, some(2), pairs.copy(), replace(QUICK))
    if change == "recipe":
        assert key != dpo._key(one, samples, pairs, replace(QUICK, beta=0.2))
    if change == "reply":
        assert key != dpo._key(one, samples, pairs.assign(rejected=["b", "c"]), QUICK)
    if change == "sample":
        other = Samples("noise", "train", [replace(s, text=s.text + "!") for s in samples])
        assert key != dpo._key(one, other, pairs, QUICK)
    if change == "model":
        assert key != dpo._key(replace(one, revision="another"), samples, pairs, QUICK)
    if change == "training code":
        monkeypatch.setattr(dpo, "_code", lambda: "another")
        assert key != dpo._key(one, samples, pairs, QUICK)
    if change == "reading code":
        monkeypatch.setattr(store, "_code", lambda real: ["another"])
        assert key != dpo._key(one, samples, pairs, QUICK)


def test_a_policy_goes_with_a_model_loaded_anew(tmp_path):
    """As a later session does: other objects, the same files."""
    folder = tiny.write("qwen3-vl", tmp_path / "model")
    vlm = load_vlm(folder, device="cpu")
    vlm.max_new_tokens = 6
    samples = some(2)
    pairs = dpo.preference_pairs(vlm, samples, {"vrh": Ablation(CUT)})
    policy = dpo.train(vlm, samples, pairs, QUICK)
    with dpo.tuned(vlm, policy) as trained:
        expected = logits(trained)
    with dpo.tuned(load_vlm(folder, device="cpu"), dpo.read_policy(policy.folder)) as trained:
        assert torch.equal(logits(trained), expected)


# ---------------------------------------------------------------- gains


def replies(rights: dict) -> pd.DataFrame:
    """{(benchmark, condition, seed): which of the samples are right}; pictures hold two samples each."""
    return pd.DataFrame([
        {"benchmark": b, "condition": c, "seed": seed, "id": f"{b}-{i}", "image": f"picture {i // 2}",
         "outcome": "correct" if right else "wrong box"}
        for (b, c, seed), rights in rights.items() for i, right in enumerate(rights)
    ]).astype({"seed": "Int64"})  # fmt: skip


def some_replies() -> tuple[pd.DataFrame, dict]:
    rng = np.random.default_rng(0)
    rights = {}
    for b, n in (("one", 40), ("two", 20)):
        rights[b, dpo.UNTRAINED, None] = rng.random(n) < 0.6
        for c, p in (("dpo vrh", 0.8), ("dpo random", 0.65)):
            for seed in range(3):
                rights[b, c, seed] = rng.random(n) < p
    return replies(rights), rights


def test_gains_are_those_of_a_loop():
    answers, rights = some_replies()
    table = dpo.gains(answers)
    for b in ("one", "two"):
        base = np.mean(rights[b, dpo.UNTRAINED, None])
        own = table[(table.benchmark == b) & (table.condition == "dpo vrh")]
        each = [100 * (np.mean(rights[b, "dpo vrh", seed]) - base) for seed in range(3)]
        np.testing.assert_allclose(own[own.seed.notna()].gain, each)
        mean = own[own.seed.isna()].iloc[0]
        assert math.isclose(mean.gain, np.mean(each)) and mean.low < mean.gain < mean.high
        assert mean.seeds_low < mean.gain < mean.seeds_high and mean.seeds == 3
        assert math.isclose(mean.unmasked, 100 * base)
    mean = table[(table.benchmark == dpo.MEAN) & (table.condition == "dpo vrh") & table.seed.isna()].iloc[0]
    parts = table[(table.benchmark != dpo.MEAN) & (table.condition == "dpo vrh") & table.seed.isna()]
    assert math.isclose(mean.gain, parts.gain.mean()) and mean.n == 60, "a benchmark counts once, however large"
    assert math.isclose(mean.unmasked, parts.unmasked.mean())


def test_differences_are_paired_by_sample_and_by_seed():
    answers, rights = some_replies()
    table = dpo.differences(answers, [("dpo vrh", "dpo random"), ("dpo vrh", dpo.UNTRAINED)])
    share = {at: 100 * np.mean(right) for at, right in rights.items()}
    by_seed = [np.mean([share[b, "dpo vrh", s] - share[b, "dpo random", s] for b in ("one", "two")]) for s in range(3)]
    row = table.iloc[0]
    assert math.isclose(row.difference, np.mean(by_seed)) and row.low < row.difference < row.high
    half = (row.seeds_high - row.seeds_low) / 2
    assert math.isclose(half, 4.302652729 * np.std(by_seed, ddof=1) / math.sqrt(3), rel_tol=1e-6), "t, two degrees"
    same = answers[answers.condition != "dpo random"]
    twin = same[same.condition == "dpo vrh"].assign(condition="dpo random")
    zero = dpo.differences(pd.concat([same, twin]), [("dpo vrh", "dpo random")]).iloc[0]
    assert (zero.difference, zero.low, zero.high) == (0, 0, 0)


def test_replies_that_are_missing_are_named():
    answers, _ = some_replies()
    with pytest.raises(ValueError, match="No replies under 'sft'"):
        dpo.differences(answers, [("dpo vrh", "sft")])
    short = answers.drop(answers[(answers.condition == "dpo vrh") & (answers.seed == 1)].index[:1])
    with pytest.raises(ValueError, match="did not reply to the same samples under every seed"):
        dpo.gains(short)
