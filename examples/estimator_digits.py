"""Cross-validate the scikit-learn classifier beside an SVM on handwritten digits, in about ten seconds.

python examples/estimator_digits.py
"""

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from kernelhead import KernelHeadClassifier


def main() -> None:
    x, y = load_digits(return_X_y=True)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    for model in (KernelHeadClassifier(random_state=0), make_pipeline(StandardScaler(), SVC())):
        print(f"{model.__class__.__name__}: {100 * cross_val_score(model, x, y, cv=folds).mean():.2f} %")

    x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0, stratify=y)
    model = KernelHeadClassifier(random_state=0).fit(x_train, y_train)
    print("share of each power in the learned kernel, t .. t^7:", model.alpha_[3:].round(2))
    print("probabilities of the first test digit:", model.predict_proba(x_test[:1]).round(3)[0])

    # It works in a grid search like any estimator. Degree 1 is the linear kernel.
    search = GridSearchCV(KernelHeadClassifier(random_state=0), {"degree": [1, 7]}, cv=3).fit(x_train, y_train)
    print(f"degree {search.best_params_['degree']}: {100 * search.score(x_test, y_test):.2f} % of the test digits")


if __name__ == "__main__":
    main()
