"""nbgrader's settings for this course; `nbgrader` reads them when it is started in this folder.

    nbgrader generate_assignment ch01_parallelism --force    solutions/ -> chapters/, without solutions and hidden
                                                             tests, and gradebook.db, which the others need
    nbgrader autograde ch01_parallelism                      submitted/STUDENT/ch01_parallelism/ -> autograded/
    nbgrader generate_feedback ch01_parallelism              -> feedback/
    nbgrader export                                          grades.csv

`vlmcourse grade` runs the same steps on one submission in a folder of its own.
"""

from vlmcourse.grading import process, steps

c = get_config()  # noqa: F821

c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "chapters"
# Everything else beside a notebook is copied to the learner, so what belongs to the instructor is named here.
c.CourseDirectory.ignore = [
    ".ipynb_checkpoints",
    "*.pyc",
    "__pycache__",
    "feedback",
    "autotests.yml",
    "*solution*",
    "*rubric*",
    "*template*",
    "*.db",
    "*.py",
    "runs",
]

# A deleted test cell is put back and run.
c.OverwriteCells.add_missing_cells = True
# Seconds for one cell; the default of 30 is short for a cell that starts ranks.
c.Execute.timeout = 180
c.Execute.raise_on_iopub_timeout = True
c.Execute.extra_arguments = list(process.QUIET_KERNEL)

# The steps of nbgrader, with ours where its own leave a hole (see vlmcourse/grading/steps.py).
c.GenerateAssignment.preprocessors = steps.for_release()
c.Autograde.sanitize_preprocessors = steps.for_sanitizing()
c.Autograde.autograde_preprocessors = steps.for_grading()
