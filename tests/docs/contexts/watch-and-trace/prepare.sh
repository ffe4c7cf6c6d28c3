phalanx run --nproc-per-node 3 train.py
test $? = 137
