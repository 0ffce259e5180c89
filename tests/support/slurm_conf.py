"""The configuration files of :mod:`tests.support.slurm_cluster`, with fast timers."""

from __future__ import annotations

CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainCores=no
ConstrainDevices=no
AllowedRAMSpace=100
"""
FIRST_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm_acct;
CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct.* TO slurm@'127.0.0.1';
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={s}/munge/sock
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
PidFile={s}/run/slurmdbd.pid
LogFile={s}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""
ACCOUNTING_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={s}/munge/sock
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5"""
SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again (default 120 s)
AuthInfo=socket={s}/munge/sock,cred_expire={cred_s}
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MailProg=/bin/true
StateSaveLocation={s}/ctld
SlurmdSpoolDir={s}/spool/%n
SlurmctldPidFile={s}/run/slurmctld.pid
SlurmdPidFile={s}/run/slurmd.%n.pid
SlurmctldLogFile={s}/log/slurmctld.log
SlurmdLogFile={s}/log/slurmd.%n.log
{processes}
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
MinJobAge=300
KillWait={kill_wait_s}
OverTimeLimit=0
SlurmctldTimeout=10
MessageTimeout=5
SlurmdTimeout=15
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MaxArraySize=1001
GresTypes=gpu
{accounting}
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{slurmd}] CPUs={cpus} \
RealMemory=64000 {gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} State=UP
PartitionName=rough Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP
PartitionName=high Nodes=ALL PriorityTier=20 PreemptMode=OFF State=UP
"""
