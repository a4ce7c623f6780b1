"""A logistic probe: what a linear model can tell from counts."""

import numpy as np


def fit_logistic(
    features: np.ndarray, labels: np.ndarray, ridge: float = 1.0, steps: int = 8
) -> np.ndarray:
    """Weights by Newton's method."""
    weights = np.zeros(features.shape[1])
    for _ in range(steps):
        probabilities = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (probabilities - labels) + ridge * weights
        hessian = (features.T * (probabilities * (1 - probabilities))) @ features + ridge * np.eye(
            len(weights)
        )
        weights -= np.linalg.solve(hessian, gradient)
    return weights


def probe_accuracy(features: np.ndarray, labels: np.ndarray, train_count: int) -> float:
    """Accuracy of a logistic regression on the rows after the first train_count, on which it is trained."""
    mean, scale = features[:train_count].mean(axis=0), features[:train_count].std(axis=0)
    scaled = np.column_stack(
        [(features - mean) / np.where(scale > 0, scale, 1), np.ones(len(features))]
    )
    weights = fit_logistic(scaled[:train_count], labels[:train_count])
    return float(((scaled[train_count:] @ weights > 0) == labels[train_count:]).mean())
