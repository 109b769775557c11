"""The storage seams and the engines behind them. A seam is a Protocol of intents: one method is one atomic change."""
