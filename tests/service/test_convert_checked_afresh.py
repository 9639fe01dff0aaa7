"""Exports that are checked by processes that start as those of a worker do, imports and all.

Of a plain model, in a folder and in a bucket; `make proofs` does it.
"""

from types import SimpleNamespace

from flax import nnx

from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, parse_uri
from tests.service.jobs import done
from tests.service.seams import logits_check
from tests.service.test_convert_checked import CONVERT, SIZES, http, report_of, root

__all__ = ["http", "root"]


def test_processes_that_are_started_afresh_compute_the_same_logits(http):
    report = report_of(http, done(http, CONVERT.format("plain", 0), {"check_logits": True}))
    assert 0 < report["relative_difference"] <= report["tolerance"] <= 1e-4
    assert report["largest_logit"] > 0.01
    assert "jax" in report["checkpoint"]["logits"]
    assert "transformers" in report["export"]["logits"]


class Patient:
    """A job that nobody ends."""

    progress = SimpleNamespace(set=lambda **options: None)

    def check(self):
        pass


def test_an_export_in_a_bucket_is_fetched_to_be_checked(gcs, tmp_path):
    config = DecoderConfig(model_type="mistral", sliding_window=9, **SIZES)
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    root = f"{gcs.bucket_uri}/checked"
    EasyDeLState.create(model=model).save_state(f"{root}/plain", wait=True)
    check = logits_check.LogitsCheck(
        parse_uri(f"{root}/plain/steps/0"), parse_uri(f"{root}/export"), config, None
    )
    model.save_pretrained(f"{root}/export")
    assert check.report(Patient())["relative_difference"] <= 1e-4
