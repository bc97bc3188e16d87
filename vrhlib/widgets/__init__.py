"""Views to play with: controls above pictures that answer a click.

    explorer         slide k: the accuracy that is left, what becomes of the replies, one picture's boxes
    knockout         click heads away on the map of scores and see where the box goes
    stepper          a reply token by token: where all heads, the top heads, the rest, or one head look
    steering         point at a thing, and the top heads look there while the answer is written
    scoring_picker   choose queries, keys and samples: which method that is, and what is left without its heads

None knows a model. What needs one is a function that is handed in (`vrhlib.live`); without it a view shows what was
stored, and says what was not. Each carries a picture of its first state in its MIME bundle, so that GitHub, nbconvert
and a headless run show something where JupyterLab shows the live view.
"""

from vrhlib.widgets.explorer import explorer
from vrhlib.widgets.knockout import knockout, recorded
from vrhlib.widgets.picker import cut_accuracies, scoring_picker
from vrhlib.widgets.steering import steering
from vrhlib.widgets.stepper import stepper

__all__ = ["cut_accuracies", "explorer", "knockout", "recorded", "scoring_picker", "steering", "stepper"]
