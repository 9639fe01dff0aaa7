"""Like things in MLflow, by an environment of its own: its python, this file, its server's address.

Each step is a logged model with a loss and the two files that an export has, and a version of a
registered model; the first version is in production.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import mlflow

RUN = "tiny"
STEPS = (1, 2, 3)
FILES = ("config.json", "model.safetensors")


class Model(mlflow.pyfunc.PythonModel):
    """What MLflow wants to log a model; nothing of it is looked at."""

    def predict(self, context: object, model_input: list[str]) -> list[str]:  # noqa: D102
        return model_input


def main() -> None:
    mlflow.set_tracking_uri(sys.argv[1])
    mlflow.set_experiment(RUN)
    with tempfile.TemporaryDirectory() as folder, mlflow.start_run(run_name=RUN):
        files = {}
        for name in FILES:
            path = Path(folder, name)
            path.write_text("{}")
            files[path.stem] = str(path)
        for step in STEPS:
            logged = mlflow.pyfunc.log_model(
                name=f"step-{step}",
                python_model=Model(),
                artifacts=files,
                step=step,
                registered_model_name=RUN,
                pip_requirements=[],
            )
            mlflow.log_metric("loss", 2.0 / step, step=step, model_id=logged.model_id)
    mlflow.MlflowClient().set_registered_model_alias(RUN, "production", "1")


if __name__ == "__main__":
    main()
