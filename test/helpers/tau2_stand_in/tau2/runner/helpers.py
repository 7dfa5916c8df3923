def load_task_splits(domain):
    return {"base": [], "test": []}
