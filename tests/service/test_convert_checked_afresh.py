"""An export that is checked by processes that start as those of a worker do, imports and all."""

from tests.service.jobs import done
from tests.service.test_convert_checked import CONVERT, http, report_of, root

__all__ = ["http", "root"]


def test_processes_that_are_started_afresh_compute_the_same_logits(http):
    report = report_of(http, done(http, CONVERT.format("plain", 0), {"check_logits": True}))
    assert 0 < report["relative_difference"] <= report["tolerance"] <= 1e-4
    assert report["largest_logit"] > 0.01
    assert "jax" in report["checkpoint"]["logits"]
    assert "transformers" in report["export"]["logits"]
