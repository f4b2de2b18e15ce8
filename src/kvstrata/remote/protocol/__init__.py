"""What both sides of a remote read say to each other, and the parts that their machines share."""
