"""Event files for TensorBoard in tensorboard/ of a run's folder, by TensorBoard's own writer.

Scalars are floats of 32 bits, as TensorBoard keeps them. Lines that a run has removed are taken back by a session log, which
readers understand as "forget everything from this step on"."""

import json
import os

from errors import RESOURCE, Refused
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

SUFFIX = ".annulus"  # of the files that are ours
STATE = ".state.json"
DATA_CLASS = {"scalars": summary_pb2.DATA_CLASS_SCALAR, "text": summary_pb2.DATA_CLASS_TENSOR}


class EventFiles:
    """Not thread safe."""

    only_grows = False  # removed() takes lines back

    def __init__(self, folder):
        self.folder = folder
        self.state = self._read_state()
        self._writer = None
        self._known = set()  # names whose metadata this file has

    def begin(self, anew):
        """Begins to write: a further file, or with `anew` the first one, in place of all earlier ones of ours."""
        os.makedirs(self.folder, exist_ok=True)
        self._write_state({})  # until it is known how far the files go, they are written anew
        if anew:
            for name in os.listdir(self.folder):
                if name.startswith("events.out.tfevents.") and name.endswith(SUFFIX):
                    os.remove(os.path.join(self.folder, name))
        try:
            self._writer = EventFileWriter(self.folder, max_queue_size=1000, flush_secs=3600, filename_suffix=SUFFIX)
        except OSError as error:
            raise Refused(RESOURCE, f"{self.folder} cannot be written: {error.strerror}") from None
        if anew:
            self.removed(0, None)

    def scalars(self, step, time, values):
        summary = summary_pb2.Summary()
        for name, number in values:
            value = summary.value.add(tag=name, simple_value=number)
            self._describe(value, "scalars")
        if summary.value:
            self._add(step, time, summary=summary)

    def text(self, step, time, name, markdown):
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[markdown.encode()],
                                        tensor_shape=tensor_shape_pb2.TensorShapeProto())
        summary = summary_pb2.Summary()
        self._describe(summary.value.add(tag=name, tensor=tensor), "text")
        self._add(step, time, summary=summary)

    def code(self, step, time, name, text):
        self.text(step, time, name, "".join("    " + line for line in text.splitlines(keepends=True)))

    def picture(self, step, time, name, data, width, height):
        image = summary_pb2.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        self._add(step, time, summary=summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=name, image=image)]))

    def removed(self, step, time):
        log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step, time, session_log=log)

    def flush(self):
        self._writer.flush()

    def end(self, state):
        """Closes the file. `state`: what the next process needs to go on behind it."""
        self._writer.close()
        self._write_state(state)

    def _describe(self, value, plugin):
        if value.tag not in self._known:
            self._known.add(value.tag)
            value.metadata.plugin_data.plugin_name = plugin
            value.metadata.data_class = DATA_CLASS[plugin]

    def _add(self, step, time, **what):
        self._writer.add_event(event_pb2.Event(wall_time=time or 0.0, step=step, **what))

    def _read_state(self):
        try:
            with open(os.path.join(self.folder, STATE)) as f:
                return json.load(f)
        except (OSError, ValueError):
            return {}

    def _write_state(self, state):
        path = os.path.join(self.folder, STATE)
        with open(path + ".new", "w") as f:
            json.dump(state, f)
        os.replace(path + ".new", path)
