"""Advice on the wire (planner.proto)."""

from __future__ import annotations

from qlm.api.v1 import planner_pb2
from qlm_planner.advice.advising import Advice


def to_proto(advice: Advice) -> planner_pb2.Advice:
    return planner_pb2.Advice(
        made_s=advice.made_s,
        line=advice.line,
        attainment=advice.attainment,
        late=advice.late,
        unserved=advice.unserved,
        misses=[
            planner_pb2.ExpectedMiss(
                group_id=miss.group_id,
                model=miss.model,
                slo_class=miss.slo_class,
                instance=miss.instance,
                waiting=miss.waiting,
                late=miss.late,
                over_s=miss.over_s,
            )
            for miss in advice.misses
        ],
        options=[
            planner_pb2.AdviceOption(
                gpu=option.gpu,
                n_gpu=option.n_gpu,
                models=option.models,
                instances=option.instances,
                attainment=option.attainment,
                enough=option.enough,
            )
            for option in advice.options
        ],
        model=advice.model,
        spare=advice.spare,
    )
