"""The paper, claim by claim: every table, figure, theorem and remark as something one can run."""
