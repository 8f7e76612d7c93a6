"""`pyrl report`: a run as a table, as a picture, and as one HTML page."""
