"""Those who stand beside the loop, one file each: who watches, examines, tells, stops in time."""
