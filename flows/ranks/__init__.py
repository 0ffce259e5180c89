"""Training stages in one process or many: started by the worker, run by each rank."""
