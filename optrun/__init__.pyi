from optrun.api import Result as Result
from optrun.api import Run as Run
from optrun.api import SweepResult as SweepResult
from optrun.api import compose as compose
from optrun.api import load_run as load_run
from optrun.api import run as run
from optrun.api import sweep as sweep
from optrun.api import transfer as transfer
from optrun.config.registry import register_callback as register_callback
from optrun.config.registry import register_data as register_data
from optrun.config.registry import register_metric as register_metric
from optrun.config.registry import register_optimizer as register_optimizer
from optrun.config.registry import register_scheduler as register_scheduler
from optrun.config.registry import register_task as register_task
from optrun.config.registry import register_tracker as register_tracker

__version__: str
