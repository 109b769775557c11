"""The five seams and the engines behind them. Each seam is a Protocol of intents: one method, one atomic change."""
