"""Takes the pictures of MLflow's pages anew, into docs/images/: `python docs/make_screenshots.py [folder]`, 3 minutes.

Trains a small CNN, searches its parameters with Optuna, registers the best model, and opens in Chromium (`make browser`
installs it) what was recorded. What a picture is to show is waited for, so a page that lacks it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.support.browser import Pages, browser, curve, link, mlflow_server, sweep_in  # noqa: E402
from tests.support.users_project import write_project  # noqa: E402

RUN = ["experiment=cnn", "model_dir=outputs/first", "tracking.run_name=first"]
SWEEP = [
    "-m", "experiment=cnn", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "sweep.metric=eval/accuracy",
    "model.params.learning_rate=tag(log,interval(0.0005,0.1))", "model.params.filters=2,4,8",
    "train.max_steps=120", "model.params.decay_steps=120", "checkpoint.save_steps=60",
]  # fmt: skip
SEEDS = [
    "-m", "run.seed=1,2,3", "model.params.learning_rate=0.02,0.002", "model.params.network=mlp", "train.max_steps=100",
    "sweep.dir=outputs/seeds", "tracking.experiment=seeds",
]  # fmt: skip
PLOTS = ("param_importances.png", "optimization_history.png", "parallel_coordinates.png")
WIDTH = 1200


def record(home: Path) -> None:
    """Run what the pictures show in the empty folder `home`."""
    write_project(home)

    def run(*arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
        subprocess.run([sys.executable, "-m", "runner", *arguments], cwd=home, env=env, check=True)

    run(*RUN)
    run(*SWEEP)
    run(*SEEDS)
    run("command=report", "model_dir=outputs/seeds")
    (sweep,) = (home / "outputs" / "sweeps").iterdir()
    best = sweep / json.loads((sweep / "sweep.json").read_text())["jobs"][0]["folder"]
    run(
        "command=export", f"model_dir={best}", "export.checkpoint=best", "export.register=digits",
        "export.alias=champion",
    )  # fmt: skip


class Pictures:
    """The pictures, taken of `pages` into `folder`."""

    def __init__(self, pages: Pages, folder: Path) -> None:
        self._pages, self._folder = pages, folder

    def take_all(self, home: Path) -> None:
        sweep, jobs = sweep_in(home)
        self.take_runs(home)
        self.take_groups(home)
        self.take_curves(sweep, jobs)
        self.take_run()
        self.take_metrics()
        self.take_image()
        self.take_sweep(sweep)
        self.take_plots(sweep)
        self.take_model()
        self.take_report(home)

    def take_runs(self, home: Path) -> None:
        """Take the page to which the last lines of the sweep lead."""
        self._open_runs(home / "outputs" / "sweeps")
        for metric in ("eval/accuracy", "eval/loss", "train/loss"):
            self._pages.see(f"//*[@role='columnheader' and contains(., '{metric}')]")
        self._pages.see(link("first"))
        self._keep("mlflow.png", height=700)

    def take_groups(self, home: Path) -> None:
        """Take the same page of a sweep with seeds, whose jobs are grouped by their settings."""
        self._open_runs(home / "outputs" / "seeds")
        self._pages.group_by("settings")
        self._pages.see("//*[@role='columnheader' and contains(., 'eval/loss')]")
        self._keep("mlflow_seeds.png", height=600)

    def _open_runs(self, sweeps: Path) -> None:
        of_job, *_ = sweeps.glob("**/shipped.mlflow.json")
        self._pages.open(json.loads(of_job.read_text())["address"].split(":5000/")[1])

    def take_curves(self, sweep: str, jobs: list[str]) -> None:
        pages = self._pages
        pages.open()
        pages.click(link("runner"))
        pages.see(link("first"))
        pages.click(f"//*[@role='gridcell' and .{link(sweep)}]//button")
        for job in jobs:
            pages.see(link(job))
        pages.click("//label[.//input[@value='CHART']]")
        self._search("^eval|^train/loss")
        for name in ("eval/accuracy", "eval/loss"):  # what is below the edge of the page is not drawn
            pages.see(curve(name))
        self._keep("mlflow_curves.png")

    def take_run(self) -> None:
        self._pages.open_run("first")
        for name in ("train/loss", "train/learning_rate", "eval/accuracy"):
            self._pages.see(f"//*[@role='row']{link(name)}")
        self._pages.see("//*[contains(normalize-space(), 'train.npz (')]")
        self._keep("mlflow_run.png", height=900)

    def take_metrics(self) -> None:
        self._pages.open_run("first", "Model metrics")
        self._pages.see(curve("eval/accuracy"))
        self._search("^eval/|^train/(loss|learning_rate|accuracy)$")
        for name in ("eval/accuracy", "eval/loss", "train/loss", "train/learning_rate", "train/accuracy"):
            self._pages.see(curve(name))
        self._keep("mlflow_metrics.png")

    def take_image(self) -> None:
        self._pages.open_run("first", "Artifacts")
        self._pages.click("//*[normalize-space(text())='images']")
        self._pages.click("//*[contains(text(), 'digits~0+step+300+') and contains(text(), '.png')]")
        self._pages.see("//img[contains(@alt, 'digits~0+step+300+')]")
        self._keep("mlflow_image.png", height=600)

    def take_sweep(self, sweep: str) -> None:
        self._pages.open_run(sweep)
        self._pages.see("//table//*[normalize-space()='finished']")
        self._pages.see(f"//*[@role='row']{link('best/eval/accuracy')}")
        self._keep("mlflow_sweep.png", height=900)

    def take_plots(self, sweep: str) -> None:
        """Take the page with each of the plots; of the second and third the plot alone, below the first."""
        self._pages.open_run(sweep, "Artifacts")
        shown = []
        for name in PLOTS:
            self._pages.click(f"//*[normalize-space(text())='{name}']")
            picture = self._pages.see(
                f"//img[contains(@src, '{name}') or @alt='{name}' or contains(@class, 'rc-image-img')]"
            )
            shown.append((self._shot(), picture.rect))
        page, first = shown[0]
        bottom = int(first["y"] + first["height"]) + 10
        tall = Image.new("RGB", (page.width, bottom + sum(int(box["height"]) + 10 for _, box in shown[1:])), "white")
        tall.paste(page.crop((0, 0, page.width, bottom)))
        for image, box in shown[1:]:
            left, top = int(box["x"]), int(box["y"])
            tall.paste(image.crop((left, top, left + int(box["width"]), top + int(box["height"]))), (left, bottom))
            bottom += int(box["height"]) + 10
        self._write(tall, "mlflow_sweep_plots.png")

    def take_model(self) -> None:
        pages = self._pages
        pages.open("#/models/digits/versions/1")
        pages.see("//*[contains(normalize-space(), 'champion')]")
        pages.see("//*[contains(text(), 'eval/accuracy')]")
        for part in ("Inputs", "Outputs"):
            pages.click(f"//*[@role='row' and contains(., '{part} (')]//*[@role='img']")
        pages.see("//*[contains(text(), 'image')]")
        self._keep("mlflow_model.png", height=900)

    def take_report(self, home: Path) -> None:
        """Take the page that command=report writes of the sweep with seeds."""
        self._pages.open_file(home / "report.html")
        self._pages.see("//h2[contains(., 'All runs')]")
        self._keep("report.png")

    def _search(self, pattern: str) -> None:
        self._pages.see("//*[@data-testid='experiment-view-compare-runs-card']")  # before, the field forgets it
        self._pages.see("//input[@placeholder='Search metric charts']").send_keys(pattern)
        # Charts of images stay, whatever is searched for: fold them up.
        self._pages.click("//*[@role='button' and .//*[starts-with(normalize-space(), 'digits')]]")

    def _shot(self) -> Any:
        self._pages.run("document.head.insertAdjacentHTML('beforeend', '<style>.modebar { display: none }</style>')")
        path = self._folder / ".page.png"
        self._pages.keep(path)
        with Image.open(path) as image:
            shot = image.convert("RGB")
        path.unlink()
        return shot

    def _keep(self, name: str, height: int | None = None) -> None:
        shot = self._shot()
        self._write(shot.crop((0, 0, shot.width, height or shot.height)), name)

    def _write(self, image: Any, name: str) -> None:
        image.thumbnail((WIDTH, 10 * WIDTH), Image.Resampling.LANCZOS)
        image.quantize(128).save(self._folder / name, optimize=True)
        print(self._folder / name, f"{(self._folder / name).stat().st_size / 1000:.0f} kB")


def main(folder: Path) -> None:
    """Take all pictures into `folder`."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as scratch:
        home = Path(scratch) / "project"
        home.mkdir()
        record(home)
        with mlflow_server(home) as address, browser(address, Path(scratch) / "profile") as pages:
            Pictures(pages, folder).take_all(home)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images")
