"""Records of Weights & Biases in wandb/ of a run's folder, by its own client in offline mode: nothing is sent until the user
calls `wandb sync`.

Its history only grows. So a run that went back to a checkpoint, or was resumed from one, is a further record of the same group,
which begins with all lines that are left."""

import contextlib
import io
import os

import wandb

from errors import RESOURCE, Refused


class WandbRecords:
    """Not thread safe."""

    only_grows = True  # what was given cannot be taken back
    state = {}  # a record cannot be continued: each process begins one

    def __init__(self, run_folder, config):
        self.folder = run_folder
        self.config = config
        self._run = None

    def begin(self, anew):
        name = os.path.basename(os.path.abspath(self.folder))
        os.environ["WANDB_MODE"] = "offline"
        quiet = wandb.Settings(console="off", disable_git=True, disable_job_creation=True, save_code=False, silent=True,
                               x_disable_stats=True, x_disable_meta=True)
        os.makedirs(os.path.join(self.folder, "wandb"), exist_ok=True)
        # The client keeps a log and a cache there, and without the variable, as in some batch jobs, complains at length.
        os.environ.setdefault("HOME", os.path.abspath(os.path.join(self.folder, "wandb")))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run = wandb.init(mode="offline", dir=self.folder, project="annulus", name=name, group=name, config=self.config,
                                       reinit="finish_previous", settings=quiet)
        except (OSError, wandb.errors.Error) as error:
            raise Refused(RESOURCE, f"{self.folder}/wandb cannot be written: {error}") from None
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step, time, values):
        row = dict(values)
        if row:
            self._run.log({"step": step, **row})

    def text(self, step, time, name, markdown):
        pass  # the configuration is the record's own; the client has no text by step

    code = text

    def picture(self, step, time, name, data, width, height):
        import PIL.Image
        self._run.log({"step": step, name: wandb.Image(PIL.Image.open(io.BytesIO(data)))})

    def removed(self, step, time):
        pass  # Follower begins another record

    def flush(self):
        pass  # the client writes by itself

    def end(self, state):
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
